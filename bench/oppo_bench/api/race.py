"""`oppo bench api --peers`: the calls that MLflow's server has as well, each program on its own database of as many runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oppo_bench.api.load import KEYS, RUNS, STEPS, Dataset
from oppo_bench.telemetry import load
from oppo_bench.telemetry.peer_trackers.mlflow import Mlflow
from oppo_bench.telemetry.peers import Times, in_turn, to_results

if TYPE_CHECKING:
    import httpx

    from oppo_bench.document import Result

CALLS = ("list_runs", "show_run", "show_metrics", "compare_runs", "submit_run")
STORED_SERIES = 20


@dataclass(frozen=True, slots=True)
class Competitor:
    """A program and its calls by operation id; the number selects one of the runs with much data."""

    name: str
    calls: Mapping[str, Callable[[int], Any]]


def mlflow_calls(server: Mlflow, there: Dataset, scale: int) -> dict[str, Callable[[int], Any]]:
    """Fills its database as ours is filled, with as many runs. `submit_run` only stores a row there."""
    server.list_runs(RUNS // scale - len(there.detailed), KEYS)
    walks = (load.walks(number, STORED_SERIES, STEPS // scale) for number in range(len(there.detailed)))
    detailed = server.keep([dict(zip(KEYS, series, strict=False)) for series in walks])

    def series(n: int) -> None:
        for key in KEYS[:2]:
            server.overview(detailed[n % len(detailed)], key)

    return {
        "list_runs": lambda n: server.table(KEYS[0], 50),
        "show_run": lambda n: server.show(detailed[n % len(detailed)]),
        "show_metrics": series,
        "compare_runs": lambda n: server.compare(detailed[:5], KEYS[0]),
        "submit_run": lambda n: server.create_run(),
    }


def race_calls(client: httpx.Client, ours: Mapping[str, Any], theirs: Mapping[str, Any], repetitions: int) -> list[Result]:
    """Each call of both, in turn."""
    times: Times = defaultdict(lambda: defaultdict(list))
    both = [
        Competitor("OPPO", {name: lambda n, call=ours[name]: call(client, n) for name in CALLS}),
        Competitor("MLflow", theirs),
    ]
    for name in CALLS:
        in_turn(both, f"{name}_ms", lambda each, n, name=name: each.calls[name](n), repetitions, times)
    return to_results(times)

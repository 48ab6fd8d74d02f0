"""`oppo bench all` finds every comparison with a peer in the documents of the benchmarks."""

from __future__ import annotations

from typing import Any

from oppo_bench.document import Result, document
from oppo_bench.everything import comparisons, markdown, to_results
from oppo_bench.machine_load import Machine
from oppo_bench.scheduler.race import compared


def made(bench: str, results: list[Result]) -> dict[str, Any]:
    return document(bench, Machine(2, 0.0, 0.0), {}, results)


def test_every_comparison_is_found() -> None:
    trl = [
        Result.of("M/B16/trl/us_per_token", "us", [4.0, 6.0]),
        Result.of("M/B16/trl/speedup", "ratio", [1.0, 1.0]),
        Result.of("M/B16/oppo/us_per_token", "us", [1.0, 1.0]),
        Result.of("M/B16/oppo/speedup", "ratio", [4.0, 6.0]),
        Result.of("M/B16/sequential/us_per_token", "us", [2.0, 3.0]),
        Result.of("M/B16/sequential/speedup", "ratio", [2.0, 2.0]),
    ]
    slurm = compared("cycle_ms/1000x200", [60.0, 70.0, None], {"Slurm's main scheduler": [12.0, 14.0, 99.0]}, tails=False)
    alone = [Result.of("freed_and_kept_back/OPPO", "times", [3])]
    found = list(comparisons({"engine": made("trl", trl), "scheduler": made("scheduler", [*slurm, *alone])}))
    assert [(each.name, each.ours["median"], each.theirs["median"], each.ratio["median"]) for each in found] == [
        ("engine/M/B16/us_per_token/TRL", 1.0, 5.0, 5.0),
        ("scheduler/cycle_ms/1000x200/Slurm's main scheduler", 65.0, 14.0, 0.2),
    ]
    assert [each.goal for each in found] == [5.0, 0.33]
    named = {result.name: result for result in to_results(found)}
    assert (named["engine/M/B16/us_per_token/TRL/ratio"].min, named["engine/M/B16/us_per_token/TRL/theirs"].max) == (4.0, 6.0)
    assert len(named) == 6


def test_the_table_has_a_column_for_each_document() -> None:
    results = compared("freed_to_dispatch_ms", [40.0, 60.0], {"Slurm": [200.0, 900.0]}, tails=False)
    once = made("all", to_results(list(comparisons({"scheduler": made("scheduler", results)}))))
    empty = made("all", [])
    assert markdown([once, empty]).splitlines() == [
        "| figure | beside | ours | theirs | times better, run 1 | times better, run 2 | goal |",
        "|---|---|---:|---:|---:|---:|---:|",
        "| `scheduler/freed_to_dispatch_ms` | Slurm | 50 | 550 | **10.00** (5.00–15.00) | – |  |",
    ]

"""`oppo bench all`: the benchmarks in turn, or with `--peers` those with other programs, and one table of all comparisons."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import click

from oppo_bench.report import write_results
from oppo_bench.scheduler.command import other_programs
from oppo_bench.scheduler.slurm import PACKAGES, PROGRAMS
from oppo_cli.home import Failure
from oppo_cli.processes import oppo_command

if TYPE_CHECKING:
    from oppo_bench.document import Result

WITH_PEERS = {
    "engine": ("trl",),
    "telemetry": ("telemetry", "--peers"),
    "scheduler": ("scheduler", "--peers"),
    "api": ("api", "--peers"),
}
WITHOUT_PEERS = {"engine": ("engine",), "telemetry": ("telemetry",), "scheduler": ("scheduler",), "api": ("api",)}
BETTER, OURS = "/ours_times_better", "OPPO"
# Least ratio, theirs ÷ ours.
GOALS = {
    "engine/M/B16/us_per_token/TRL": 5.0,
    "scheduler/submit_to_program_ms/p95/Slurm": 1.0,
    "scheduler/cycle_ms/1000x200/Slurm's main scheduler": 0.33,
    "scheduler/freed_to_dispatch_ms/p95/Slurm": 1.0,
    "scheduler/freed_to_dispatch_single_ms/p95/Slurm": 1.0,
}
REPEATED = 50
QUERY = "SELECT sum(n * n) FROM generate_series(1, 20000) AS n"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of ours and of a peer; `ratio`: how many times better ours is, with its spread."""

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    ratio: dict[str, Any]

    @property
    def goal(self) -> float | None:
        """The least ratio that is aimed at."""
        return GOALS.get(self.name)


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON as well.")
@click.option("--quick", is_flag=True, help="Fewer repetitions and less data.")
@click.option("--peers", is_flag=True, help="Beside TRL, MLflow, trackio, TensorBoard and Slurm.")
@click.option(
    "--table", "tables", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measure nothing: print the comparisons of such a JSON file as a Markdown table. Repeatable: a column for each.",
)  # fmt: skip
def everything(json_file: Path | None, quick: bool, peers: bool, tables: tuple[Path, ...]) -> None:
    """The benchmarks of engine, telemetry, scheduler and API. With --peers those beside other programs, in one table.

    The table has ours, theirs, the ratio and the goal. Absolute times depend on the machine, ratios hardly: a fixed matrix
    product, database query and local request are timed before and after.
    """
    if tables:
        click.echo(markdown([json.loads(file.read_text()) for file in tables]))
        return
    if peers:
        _require_slurm()
    before, results = other_programs(), yardsticks("before")
    documents: dict[str, dict[str, Any]] = {}
    for area, command in (WITH_PEERS if peers else WITHOUT_PEERS).items():
        click.echo(f"oppo bench {' '.join(command)} …", err=True)
        documents[area] = _run([*command, *(["--quick"] if quick else [])])
        compared = list(comparisons(documents))
        settings = {"quick": quick, "peers": peers, "areas": documents}
        write_results("all", before, settings, [*results, *to_results(compared)], json_file)
    results += [*to_results(compared), *yardsticks("after")]
    write_results("all", before, settings, results, json_file)
    _show(compared, results)


def _run(arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="oppo-bench-") as folder:
        file = Path(folder) / "figures.json"
        command = oppo_command("bench", *arguments, "--json", str(file))
        if subprocess.run(command, check=False).returncode:
            raise Failure(f"oppo bench {' '.join(arguments)} failed, see above.")
        document: dict[str, Any] = json.loads(file.read_text())
        return document


def comparisons(documents: Mapping[str, Mapping[str, Any]]) -> Iterator[Comparison]:
    """Every figure that a document has of ours and of a peer."""
    for area, document in documents.items():
        named = {row["name"]: row for row in document["results"]}
        for name, row in named.items():
            figure, _, who = name.rpartition("/")[0].rpartition("/")
            if name.endswith(BETTER) and f"{figure}/{OURS}" in named:
                yield Comparison(f"{area}/{figure}/{who}", named[f"{figure}/{OURS}"], named[f"{figure}/{who}"], row)
            elif document["bench"] == "trl" and name.endswith("/oppo/speedup"):
                ours, theirs = (named[f"{figure}/{each}/us_per_token"] for each in ("oppo", "trl"))
                yield Comparison(f"{area}/{figure}/us_per_token/TRL", ours, theirs, row)


def to_results(compared: list[Comparison]) -> list[Result]:
    """As figures `{area}/{figure}/{peer}/{ours,theirs,ratio}`."""
    from oppo_bench.document import Result

    parts = [(each.name, (("ours", each.ours), ("theirs", each.theirs), ("ratio", each.ratio))) for each in compared]
    return [Result(**{**row, "name": f"{name}/{part}"}) for name, rows in parts for part, row in rows]


def markdown(documents: Sequence[Mapping[str, Any]]) -> str:
    """A table of all comparisons: ours and theirs as the last document has them, and the ratio of each with its spread."""
    named = [{row["name"]: row for row in document["results"]} for document in documents]
    runs = [f"times better, run {number}" for number in range(1, len(named) + 1)] if len(named) > 1 else ["times better"]
    lines = ["| figure | beside | ours | theirs | " + " | ".join(runs) + " | goal |", "|---|---|" + "---:|" * (len(named) + 3)]
    for name in dict.fromkeys(name.removesuffix("/ratio") for rows in named for name in rows if name.endswith("/ratio")):
        rows = next(rows for rows in reversed(named) if f"{name}/ratio" in rows)
        medians = (rows[f"{name}/{who}"]["median"] for who in ("ours", "theirs"))
        values = [f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in medians]  # the figure's name has the unit
        ratios = [_ratio(rows.get(f"{name}/ratio")) for rows in named]
        figure, _, peer = name.rpartition("/")
        goal = f"{GOALS[name]:g}" if name in GOALS else ""
        lines.append("| " + " | ".join([f"`{figure}`", peer, *values, *ratios, goal]) + " |")
    return "\n".join(lines)


def _ratio(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"**{row['median']:,.2f}**" + (f" ({row['min']:,.2f}–{row['max']:,.2f})" if row["n"] > 1 else "")


def yardsticks(when: str) -> list[Result]:
    """Times of a fixed matrix product, a fixed database query and a local request, milliseconds."""
    import numpy as np
    import psycopg

    from oppo_bench.document import Result
    from oppo_platform import embedded

    square = np.random.default_rng(0).random((512, 512), dtype=np.float32)
    taken = {"matrix_product": [_timed(lambda: square @ square) for _ in range(REPEATED)]}
    with tempfile.TemporaryDirectory(prefix="oppo-bench-") as folder:
        server = embedded.PostgresServer(Path(folder))
        try:
            with embedded.postgres(Path(folder)) as url, psycopg.connect(url) as connection:
                taken["database_query"] = [_timed(lambda: connection.execute(QUERY)) for _ in range(REPEATED)]
        finally:
            server.remove_data()
    taken["local_request"] = _requests()
    return [Result.of(f"machine/{name}_ms/{when}", "ms", values) for name, values in taken.items()]


def _require_slurm() -> None:
    """Raises Failure if the last benchmark could not run: the first ones take half an hour."""
    if os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)):
        raise Failure(f"Slurm is needed, as root. On Debian: apt-get install {PACKAGES}")


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def _requests() -> list[float]:
    import httpx

    class Hello(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hello) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}", trust_env=False) as client:
            taken = [_timed(lambda: client.get("/")) for _ in range(REPEATED)]
        server.shutdown()
    return taken


def _show(compared: list[Comparison], results: list[Result]) -> None:
    from rich.table import Table

    from oppo_cli.simulate_tables import console

    screen = console()
    table = Table(title="Beside others" if compared else None, title_justify="left", box=None, pad_edge=False)
    table.add_column("figure")
    for heading in ("ours", "theirs", "times better", "min–max", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in compared:
        goal = "" if each.goal is None else f"{each.goal:.2f}{'' if each.ratio['median'] >= each.goal else ' missed'}"
        cells = (f"{each.ours['median']:,.3g}", f"{each.theirs['median']:,.3g}", f"{each.ratio['median']:,.2f} ×")
        spread = f"{each.ratio['min']:,.2f}–{each.ratio['max']:,.2f}" if each.ratio["n"] > 1 else ""
        table.add_row(f"{each.name} [{each.ours['unit']}]", *cells, spread, goal)
    screen.print(table, highlight=False)
    for result in results:
        if result.name.startswith("machine/"):
            screen.print(
                f"{result.name}: {result.median:.3f} ms ({result.min:.3f}–{result.max:.3f})", style="dim", highlight=False
            )

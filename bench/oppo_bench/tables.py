"""Tables of benchmark results in the terminal."""

from __future__ import annotations

from rich.table import Table

from oppo_bench.document import Result
from oppo_cli.simulate_tables import console


def show(title: str, results: list[Result]) -> None:
    """Print figures: median (or what the name says), minimum, maximum, repetitions."""
    table = Table(title=title, title_justify="left")
    for column in ("figure", "median", "min", "max", "n"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for r in results:
        shown = (
            f"{figure:,.3f}" if r.unit != "ms" and abs(figure) < 100 else f"{figure:,.1f}" for figure in (r.median, r.min, r.max)
        )
        table.add_row(f"{r.name} [{r.unit}]", *shown, str(r.n))
    console().print(table)


def case_table(case: str, variants: list[str], results: list[Result]) -> Table:
    """One row per variant: time per trained token with its spread, time per step, ratios and shares (docs/benchmarks.md)."""
    named = {result.name: result for result in results}
    table = Table(title=case, title_justify="left", box=None, pad_edge=False)
    table.add_column("variant", no_wrap=True)
    for heading in ("µs a token", "min–max", "ms a step", "speed-up", "to floor", "bubble", "overlap", "rows", "deferred"):
        table.add_column(heading, justify="right", no_wrap=True)
    for variant in variants:
        token = named.get(f"{case}/{variant}/us_per_token")
        if token is None:
            continue
        row = {key: named.get(f"{case}/{variant}/{key}") for key in _SHAPES}
        cells = [shape.format(result.median * scale) if (result := row[key]) else "–" for key, (shape, scale) in _SHAPES.items()]
        table.add_row(variant, f"{token.median:,.1f}", f"{token.min:,.1f}–{token.max:,.1f}", *cells)
    return table


_SHAPES = {
    "us_per_step": ("{:,.0f}", 1e-3), "speedup": ("{:.2f} ×", 1.0), "to_floor": ("{:.2f} ×", 1.0), "bubble": ("{:.0f} %", 100.0),
    "overlap_factor": ("{:.2f}", 1.0), "decode_occupancy": ("{:.0f} %", 100.0), "deferred_share": ("{:.0f} %", 100.0),
}  # fmt: skip


def floor_line(case: str, results: list[Result]) -> str:
    """The floor's stages in one line."""
    stages = [
        f"{result.name.split('/')[3]} {result.median:,.1f}"
        for result in results
        if result.name.startswith(f"{case}/floor/") and result.name.count("/") == 4
    ]
    return f"floor, µs a token: {', '.join(stages)}" if stages else ""


def peer_table(case: str, results: list[Result]) -> Table:
    """One row per trainer: time per trained token with its spread, time per step, and the speed-up over TRL."""
    named = {result.name: result for result in results}
    table = Table(title=case, title_justify="left", box=None, pad_edge=False)
    table.add_column("trainer", no_wrap=True)
    for heading in ("µs a token", "min–max", "ms a step", "TRL ÷ this", "min–max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in dict.fromkeys(result.name.split("/")[2] for result in results):
        token, step, ratio = (named[f"{case}/{name}/{key}"] for key in ("us_per_token", "us_per_step", "speedup"))
        table.add_row(
            name, f"{token.median:,.1f}", f"{token.min:,.1f}–{token.max:,.1f}", f"{step.median / 1e3:,.0f}",
            f"{ratio.median:.2f} ×", f"{ratio.min:.2f}–{ratio.max:.2f}",
        )  # fmt: skip
    return table

"""`oppo simulate --paper`: the OPPO paper's layouts, its figures and simulated ones, and sensitivity to assumptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from oppo_cli.simulate_tables import Progress, console, lengths_text, percent

if TYPE_CHECKING:
    from oppo_core.simulation.paper import Case, Verdict
    from oppo_estimate.schedules import Row

STEPS = 15
SCHEDULES = 4


def paper_report(steps: int | None) -> dict[str, Any]:
    """Simulate and print; returns the results as JSON data. `steps`: simulated steps per schedule."""
    from oppo_core.simulation.paper import layouts, simulate_case, verdicts
    from oppo_core.simulation.sensitivity import cases, serving_cases, simulate_serving

    steps, screen = steps or STEPS, console()
    paper_layouts, changes, served = layouts(), cases(), serving_cases()
    total = (len(paper_layouts) + len(changes)) * SCHEDULES + len(served) * (SCHEDULES + 1)
    with Progress(screen, total * steps) as progress:
        results = [(case, simulate_case(case, steps, progress.show)) for case in paper_layouts]
        sensitivity = [(case, simulate_case(case, steps, progress.show)) for case in changes]
        serving = [(case, simulate_serving(case, steps, progress.show)) for case in served]
    judgements = verdicts(results)
    screen.print(_layout_table(results), highlight=False)
    screen.print(_claim_table(judgements), highlight=False)
    screen.print(_sensitivity_table(sensitivity), highlight=False)
    screen.print(_assumptions(paper_layouts[0], steps), highlight=False, style="dim")
    screen.print(_serving_table(serving), highlight=False)
    screen.print(_serving_assumptions(steps), highlight=False, style="dim")
    return {
        "simulate": "paper", "steps": steps, "layouts": _as_json(results),
        "figures": [verdict.as_json() for verdict in judgements], "sensitivity": _as_json(sensitivity),
        "serving": _as_json(serving),
    }  # fmt: skip


def _as_json(results: list[tuple[Case, dict[str, Row]]]) -> dict[str, list[dict[str, Any]]]:
    return {case.name: [row.as_json() for row in rows.values()] for case, rows in results}


def _layout_table(results: list[tuple[Case, dict[str, Row]]]) -> Table:
    from oppo_core.simulation.paper import KERNELS_IN_DECODE, utilization

    table = _table("The paper's layouts on virtual devices", "layout", "schedule")
    shares = [f"decode at {percent(share)}" for share in KERNELS_IN_DECODE]
    for heading in ("a step", "speed-up", "busy", *shares, "decoding", "deferred", "by steps", "stale"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case, rows in results:
        for row in rows.values():
            busy = [percent(utilization(row, case, kernels)) for kernels in (1.0, *KERNELS_IN_DECODE)]
            table.add_row(
                case.name, row.schedule, f"{row.step_s:,.0f} s", f"{row.speedup:.2f} ×", *busy, percent(row.decode_share),
                percent(row.deferred_share), f"{row.deferred_age:.1f}", percent(row.stale_share),
            )  # fmt: skip
    return table


def _claim_table(judgements: list[Verdict]) -> Table:
    table = _table("\nThe paper's public figures (range over these four layouts)", "figure")
    for heading in ("paper", "simulated"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("explained?", no_wrap=True)
    table.add_column("remark", overflow="fold")
    for verdict in judgements:
        claim = verdict.claim
        claimed, simulated = (_range(row.low, row.high, claim.unit) for row in (claim, verdict))
        table.add_row(claim.what, claimed, simulated, verdict.explained, claim.remark)
    return table


def _sensitivity_table(results: list[tuple[Case, dict[str, Row]]]) -> Table:
    from oppo_core.simulation.sensitivity import BASE

    table = _table(f"\nWhat each assumption changes, alone ({BASE})", "assumption")
    for heading in ("sequential", "both", "decoding", "intra", "inter", "both ", "stale"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case, rows in results:
        sequential, both = rows["sequential"], rows["both"]
        gains = [f"{rows[name].speedup:.2f} ×" for name in ("intra", "inter", "both")]
        table.add_row(
            case.name, f"{sequential.step_s:,.0f} s", f"{both.step_s:,.0f} s", percent(sequential.decode_share), *gains,
            percent(both.stale_share),
        )  # fmt: skip
    return table


def _serving_table(results: list[tuple[Case, dict[str, Row]]]) -> Table:
    from oppo_core.simulation.sensitivity import BASE, HALVES

    table = _table(f"\nWith a serving engine, packed batches and one epoch ({BASE})", "batch and answers")
    for heading in ("sequential", "decoding", "intra, 7 + 1", "inter, all 8", "both, 7 + 1", HALVES, "stale"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case, rows in results:
        sequential = rows["sequential"]
        gains = [f"{rows[name].speedup:.2f} ×" for name in ("intra", "inter", "both", HALVES)]
        table.add_row(
            case.name, f"{sequential.step_s:,.1f} s", percent(sequential.decode_share), *gains, percent(rows["inter"].stale_share)
        )
    return table


def _serving_assumptions(steps: int) -> str:
    from oppo_core.simulation.sensitivity import KERNELS_US

    return (
        f"\nAssumed: decode steps of {KERNELS_US / 1000} ms, Δ B ÷ 4, C an eighth of the longest response, {steps} steps."
        " Sequential and inter use all 8 GPUs for every stage; 7 + 1: one GPU for the reward model;"
        " 4 + 4: half of the GPUs for all scorers and the critic's training."
    )


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _range(low: float, high: float, unit: str) -> str:
    """`1.2–1.3 ×`, or one number if both are equal."""

    def text(value: float) -> str:
        return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

    figures = text(low) if text(low) == text(high) else f"{text(low)}–{text(high)}"
    return f"{figures} {unit}".rstrip()


def _assumptions(case: Case, steps: int) -> str:
    spec, workload = case.spec, case.devices.workload
    ppo, overlap = spec.ppo, spec.overlap
    longest, excluded = spec.rollout.max_new_tokens, min(overlap.max_age + 1, steps - 1)
    return (
        f"\nAssumed: B {ppo.batch_size}, {ppo.epochs} epochs, C {spec.initial_chunk_size}, Δ {overlap.overcommit.initial},"
        f" max_age {overlap.max_age}; responses {lengths_text(case.devices)}, cut at {longest:,} tokens, prompts of"
        f" {workload.prompt_tokens}. Means of {steps} simulated steps, without the first {excluded}."
        " No constant is fitted to the paper unless a row says so; sources: docs/simulation.md."
        " decoding: share of a step; deferred, by steps: share of deferred responses, and their mean age."
    )

"""Sensitivity of the simulated speed-ups to each assumption, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from oppo_core.simulation.fit_costs import cost_at, with_cost
from oppo_core.simulation.paper import LAYOUTS, PAPER_SPEC, Case, paper_spec, simulate_case
from oppo_core.simulation.plan import Progress, no_progress, plan
from oppo_estimate.devices import READING_ROLES, Devices, LogNormal, load_devices
from oppo_estimate.schedules import Row, Target, with_speedups

BASE = "paper-h200-7b"
READING = tuple(f"costs.{role}.token_us" for role in ("actor", "reward", "reference", "critic"))
BACKWARD = ("costs.actor.backward_us", "costs.critic.backward_us")
ROUND, ROW, HANDOVER = "costs.decode.round_us", "costs.decode.row_us", "overheads.handover_us"
CRITIC = ("costs.critic.pass_us", "costs.critic.token_us", "costs.critic.backward_us")
MFU = 0.4  # that of the machine files
KERNELS_US = 7400.0  # a decode step without the host's gaps, as with CUDA graphs: docs/simulation.md
Changed = Callable[[Devices], Devices]


def scaled(factor: float, *paths: str) -> Changed:
    """Devices with some costs multiplied."""

    def change(devices: Devices) -> Devices:
        for path in paths:
            devices = with_cost(devices, path, factor * cost_at(devices, path))
        return devices

    return change


def costing(us: float, path: str) -> Changed:
    """Devices with one cost set, µs."""
    return lambda devices: with_cost(devices, path, us)


def answering(median: float, sigma: float) -> Changed:
    """Devices with other answer lengths."""
    lengths = LogNormal(median=median, sigma=sigma)
    return lambda devices: devices.model_copy(update={"workload": devices.workload.model_copy(update={"lengths": lengths})})


def having(**fields: Any) -> Changed:
    """Devices with other top-level fields."""
    return lambda devices: devices.model_copy(update=fields)


def overlapping(**fields: Any) -> dict[str, Mapping[str, Any]]:
    """The paper's spec with other fields of `overlap`, one level deep."""
    overlap: dict[str, Any] = PAPER_SPEC["overlap"]
    return {"overlap": {name: overlap[name] | value if isinstance(value, dict) else value for name, value in fields.items()}}


def fixed(overcommit: int) -> dict[str, Mapping[str, Any]]:
    """The paper's spec with another Δ."""
    return overlapping(overcommit={"initial": overcommit, "max": overcommit})


# Assumption, its value, how the devices change, how the spec changes.
CHANGES: tuple[tuple[str, Changed | None, dict[str, Mapping[str, Any]]], ...] = (
    ("as assumed", None, {}),
    ("length tail: σ 0.5", answering(512, 0.5), {}),
    ("length tail: σ 1.2", answering(512, 1.2), {}),
    ("median length 256", answering(256, 0.9), {}),
    ("median length 1,024", answering(1024, 0.9), {}),
    ("longest answer 2,048", None, {"rollout": {"max_new_tokens": 2048}}),
    ("longest answer 8,192", None, {"rollout": {"max_new_tokens": 8192}}),
    ("decode step 7.4 ms (eager kernels alone)", costing(KERNELS_US, ROUND), {}),
    ("decode step 3.2 ms (memory bandwidth alone)", costing(3200, ROUND), {}),
    ("decode step 58 ms (twice as slow)", scaled(2, ROUND), {}),
    ("decode row × 10", scaled(10, ROW), {}),
    ("MFU 0.54 (best measured)", scaled(MFU / 0.54, *READING, *BACKWARD), {}),
    ("MFU 0.2", scaled(MFU / 0.2, *READING, *BACKWARD), {}),
    ("no recomputation of activations", scaled(2 / 3, *BACKWARD), {}),
    ("one epoch", None, {"ppo": {"epochs": 1}}),
    ("critic is a head of the actor", scaled(0, *CRITIC), {}),
    ("reward model 3B", scaled(3.09 / 7.62, "costs.reward.token_us", "costs.reward.pass_us"), {}),
    ("reward model 14B", scaled(2, "costs.reward.token_us", "costs.reward.pass_us"), {}),
    ("reward model at MFU 0.2", scaled(2, "costs.reward.token_us"), {}),
    ("reward model at MFU 0.1", scaled(4, "costs.reward.token_us"), {}),
    ("C = 100", None, overlapping(chunk={"size": 100})),
    ("C = 3,000", None, overlapping(chunk={"size": 3000})),
    ("C = 100, a hand-over costs five rounds", costing(5 * 29000, HANDOVER), overlapping(chunk={"size": 100})),
    ("C = 500, a hand-over costs five rounds", costing(5 * 29000, HANDOVER), {}),
    ("Δ = 14 (B ÷ 8)", None, fixed(14)),
    ("Δ = 56 (B ÷ 2)", None, fixed(56)),
    ("Δ = 112 (B)", None, fixed(112)),
    ("max_age 1", None, overlapping(max_age=1)),
    ("max_age 5", None, overlapping(max_age=5)),
    ("no padding", having(padded=False), {}),
    ("all stages share all 8 GPUs unless streaming", having(without_streaming="share"), {}),
)


# Chosen only because they bring the simulation near the paper's figures.
FITTED = ("one epoch, reward model at MFU 0.2", scaled(2, "costs.reward.token_us"), {"ppo": {"epochs": 1}})


def cases() -> list[Case]:
    """Every assumption changed alone, then changes of the sequential run only, then a fit."""
    base, spec = load_devices(BASE), paper_spec()
    lean, shared = having(padded=False)(base), having(padded=False, without_streaming="share")(base)
    fit, fitting, settings = FITTED
    alone = [Case(name, paper_spec(**sections), change(base) if change else base) for name, change, sections in CHANGES]
    return [
        *alone,
        Case("only the sequential run pads", spec, lean, baseline=base),
        Case("no padding, sequential shares all 8 GPUs", spec, lean, baseline=shared),
        *(Case(f"fitted, {name}: {fit}", paper_spec(**settings), fitting(load_devices(name))) for name in LAYOUTS[:2]),
    ]


BATCHES = (112, 256, 1024)
# Longest answer and median, tokens. The second is the first ÷ 8: the same shape. In the third, half of the answers are cut.
ANSWERS = ((4096, 512), (512, 64), (512, 512))
HALVES = "both, 4 + 4"


def serving_cases(seed: int = 0) -> list[Case]:
    """Every batch size with every kind of answers on `BASE`, decoded by a serving engine: steps of 7.4 ms.

    Packed, one epoch, Δ = B ÷ 4, C an eighth of the longest answer. Without streaming all devices do every stage: `inter`
    is deferral alone on all 8.
    """
    devices = having(padded=False, without_streaming="share")(costing(KERNELS_US, ROUND)(load_devices(BASE)))
    cases = []
    for longest, median in ANSWERS:
        for batch in BATCHES:
            overlap = overlapping(chunk={"size": longest // 8}, overcommit={"initial": batch // 4, "max": batch // 4})
            ppo, rollout = {"batch_size": batch, "epochs": 1}, {"max_new_tokens": longest}
            spec = paper_spec(ppo=ppo, rollout=rollout, **overlap).model_copy(update={"seed": seed})
            name = f"B {batch:,}, median {median}, to {longest:,}"
            cases.append(Case(name, spec, answering(median, 0.9)(devices)))
    return cases


def simulate_serving(case: Case, steps: int, on_step: Progress = no_progress) -> dict[str, Row]:
    """`simulate_case`, and `HALVES`: half of the devices for all scorers, the critic's training included."""
    halves = having(actor=4, groups={"scorer": 4}, place=dict.fromkeys(READING_ROLES, "scorer"))(case.devices)
    rows = list(simulate_case(case, steps, on_step).values())
    more = plan(
        case.spec, halves, Target(case.spec.steps), steps, schedules=("both",),
        progress=lambda _, step: on_step(f"{case.name}, {HALVES}", step),
    )  # fmt: skip
    rows += [replace(row, schedule=HALVES) for row in more]
    return {row.schedule: row for row in with_speedups(rows)}

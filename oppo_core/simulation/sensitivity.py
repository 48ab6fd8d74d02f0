"""Sensitivity of the simulated speed-ups to each assumption, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oppo_core.simulation.fit_costs import cost_at, with_cost
from oppo_core.simulation.paper import LAYOUTS, PAPER_SPEC, Case, paper_spec
from oppo_estimate.devices import Devices, LogNormal, load_devices

BASE = "paper-h200-7b"
READING = tuple(f"costs.{role}.token_us" for role in ("actor", "reward", "reference", "critic"))
BACKWARD = ("costs.actor.backward_us", "costs.critic.backward_us")
ROUND, ROW, HANDOVER = "costs.decode.round_us", "costs.decode.row_us", "overheads.handover_us"
CRITIC = ("costs.critic.pass_us", "costs.critic.token_us", "costs.critic.backward_us")
MFU = 0.4  # that of the machine files
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
    ("decode step 7.4 ms (eager kernels alone)", costing(7400, ROUND), {}),
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

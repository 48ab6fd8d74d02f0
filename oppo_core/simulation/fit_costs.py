"""Costs fitted to a recorded run by non-negative least squares over its spans.

A span's time is a sum of costs times counts (rounds, rows, tokens, passes). The counts come from replays on virtual devices:
doubling one cost lengthens each span by that cost's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oppo_contract.events import Phase
from oppo_core.simulation.recording import Key, Recording, RecordingError
from oppo_core.simulation.replay import SECOND_US, build_replay, devices_like, run, simulated_spans
from oppo_estimate.devices import Devices

# Phases of one kind of work, and the costs that make up their time.
BLOCKS: dict[str, tuple[tuple[Phase, ...], tuple[str, ...]]] = {
    "decode": (("decode",), ("costs.decode.round_us", "costs.decode.row_us", "costs.decode.cached_token_us")),
    "actor": (
        ("actor-prefill", "actor-forward", "update-actor"),
        ("costs.actor.pass_us", "costs.actor.token_us", "costs.actor.backward_us", "costs.actor.optimizer_us"),
    ),
    "reward": (("reward-prefill",), ("costs.reward.pass_us", "costs.reward.token_us")),
    "reference": (("reference-prefill",), ("costs.reference.pass_us", "costs.reference.token_us")),
    "critic": (
        ("critic-prefill", "update-critic"),
        ("costs.critic.pass_us", "costs.critic.token_us", "costs.critic.backward_us", "costs.critic.optimizer_us"),
    ),
    "score": (("score",), ("overheads.score_us",)),
    "advantages": (("advantages",), ("overheads.advantage_us",)),
    "data": (("data",), ("overheads.prompt_us", "overheads.report_us")),
}


@dataclass(frozen=True, slots=True)
class BlockFit:
    """Fit of one kind of work: number of spans, recorded seconds, and mean absolute error per span ÷ mean span."""

    name: str
    spans: int
    seconds: float
    error: float
    costs: dict[str, float]


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted devices; `other_s`: seconds per step outside all blocks, taken as a fixed cost."""

    devices: Devices
    blocks: list[BlockFit]
    other_s: float


def fit(recording: Recording) -> Fit:
    """Fit every cost.

    Raises:
        RecordingError: the run used a feature that cannot be build_replay, or its spans differ from the replay's.
    """
    _check_supported(recording)
    template = devices_like(recording)
    base = _spans(recording, template)
    recorded = {key: span for step in recording.steps for key, span in step.spans.items()}
    common = [key for key in base if key in recorded]
    if not common:
        raise RecordingError("the recorded spans are not those of its spec; is it the right spec?")
    devices, blocks = template, []
    for name, (phases, paths) in BLOCKS.items():
        keys = [key for key in common if key[2] in phases and _is_work(key)]
        counts = (
            [_column(_spans(recording, with_cost(template, path, 2 * SECOND_US)), base, keys) for path in paths] if keys else []
        )
        block = _fitted(name, paths, keys, counts, recorded)
        blocks.append(block)
        for path, us in block.costs.items():
            devices = with_cost(devices, path, us)
    other = _other_seconds(recording, set(common)) / len(recording.steps)
    report_us = devices.overheads.report_us + 1e6 * other
    return Fit(with_cost(devices, "overheads.report_us", report_us), blocks, other)


def with_cost(devices: Devices, path: str, us: float) -> Devices:
    """The devices with the cost at a dotted path set."""
    tree = devices.model_dump()
    part: dict[str, Any] = tree
    *parents, last = path.split(".")
    for name in parents:
        part = part[name]
    part[last] = us
    return Devices.model_validate(tree)


def cost_at(devices: Devices, path: str) -> float:
    """The cost at a dotted path."""
    value: Any = devices
    for name in path.split("."):
        value = getattr(value, name)
    return float(value)


def nonnegative_least_squares(columns: Sequence[NDArray[np.float64]], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights ≥ 0 of `columns` whose sum comes closest to `target`; columns with negative weights are dropped."""
    weights = np.zeros(len(columns))
    used = [number for number, column in enumerate(columns) if column.any()]
    while used:
        matrix = np.stack([columns[number] for number in used], axis=1)
        scale = np.abs(matrix).max(axis=0)
        solution = np.linalg.lstsq(matrix / scale, target, rcond=None)[0] / scale
        if (solution >= 0).all():
            weights[used] = solution
            break
        used.remove(used[int(np.argmin(solution * scale))])
    return weights


def _fitted(
    name: str, paths: Sequence[str], keys: list[Key], counts: list[NDArray[np.float64]], recorded: dict[Key, tuple[float, float]]
) -> BlockFit:
    seconds = np.array([recorded[key][1] - recorded[key][0] for key in keys])
    weights = nonnegative_least_squares(counts, seconds)
    explained = sum((w * column for w, column in zip(weights, counts, strict=False)), np.zeros(len(keys)))
    # A replay needs the block's exact sum, which least squares without a constant may miss.
    stretch = float(seconds.sum() / explained.sum()) if explained.any() else 1.0
    error = float(np.abs(seconds - stretch * explained).mean() / seconds.mean()) if seconds.any() else 0.0
    costs = {path: float(1e6 * stretch * w) for path, w in zip(paths, weights, strict=False)}
    costs |= {path: 0.0 for path in paths if path not in costs}
    return BlockFit(name, len(keys), float(seconds.sum()), error, costs)


def _is_work(key: Key) -> bool:
    """Whether the span is the work itself, not its submission to another process."""
    return key[1] == {"score": "reward", "advantages": "actor"}.get(key[2], key[1])


def _column(
    changed: dict[Key, tuple[float, float]], base: dict[Key, tuple[float, float]], keys: list[Key]
) -> NDArray[np.float64]:
    """Seconds by which each span is longer than in `base`."""
    return np.array([(changed[key][1] - changed[key][0]) - (base[key][1] - base[key][0]) for key in keys])


def _spans(recording: Recording, devices: Devices) -> dict[Key, tuple[float, float]]:
    engine = build_replay(recording, devices)
    for _ in run(engine, recording, follow=True):
        pass
    return simulated_spans(engine)


def _other_seconds(recording: Recording, common: set[Key]) -> float:
    """Seconds of the loop's process outside the spans of all blocks."""
    seconds = 0.0
    for step in recording.steps:
        own = [(key, span) for key, span in step.spans.items() if key[1] == "actor"]
        seconds += sum(end - start for key, (start, end) in own if key not in common)
        seconds += step.unknown_s
    return seconds


def _check_supported(recording: Recording) -> None:
    spec = recording.spec
    reasons = {
        "overlap.update_overlap (early gradients are not recorded)": spec.overlap.update_overlap,
        "overlap.inter_step tail_batch (lengths of discarded answers are not recorded)": (
            spec.overlap.inter_step == "tail_batch"
        ),
        "ppo.algorithm other than ppo (a replay has no groups and needs a critic)": spec.ppo.algorithm != "ppo",
    }
    used = [name for name, applies in reasons.items() if applies]
    if used:
        raise RecordingError(f"the run used {', '.join(used)}; its costs cannot be fitted")

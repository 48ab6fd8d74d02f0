"""The schedules that the simulator compares, each a variant of one spec, and a row of results for each.

Δ, C, `max_age` and the controllers stay those of the spec.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from oppo_contract.spec import RunSpec, load_spec
from oppo_estimate.devices import ACTOR_GROUP, Devices

BASELINE = "sequential"
PLAIN = {"intra_step": "off", "inter_step": "off", "update_overlap": False}
SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential": PLAIN,
    "per sequence": PLAIN | {"intra_step": "per_sequence"},
    "intra": PLAIN | {"intra_step": "per_chunk"},
    "inter": PLAIN | {"inter_step": "defer"},
    "both": PLAIN | {"intra_step": "per_chunk", "inter_step": "defer"},
    "both + update overlap": {"intra_step": "per_chunk", "inter_step": "defer", "update_overlap": True},
    "tail batch": PLAIN | {"intra_step": "per_chunk", "inter_step": "tail_batch"},
}
DEFAULT_OVERCOMMIT_SHARE = 4  # Δ = B ÷ 4 if the spec defers nothing and so sets no Δ


def variant(spec: RunSpec, schedule: str, steps: int | None = None, overcommit: int | None = None) -> RunSpec:
    """`spec` with another schedule, without timeline events and samples; `overcommit`: a fixed Δ.

    Raises:
        SpecError: the spec's other settings do not allow this schedule; the message names them.
    """
    tree = spec.model_dump(mode="json")
    tree["overlap"] |= SCHEDULES[schedule]
    if tree["overlap"]["inter_step"] != "off":
        tree["overlap"]["overcommit"] = _overcommit(spec, overcommit)
    if tree["overlap"]["inter_step"] != "defer":
        tree["overlap"]["kv_after_update"] = "recompute"  # without deferral no cache outlives an update
    tree["logging"] |= {"samples_per_step": 0, "spans_every": 10**9}
    return load_spec(shortened(tree, steps or spec.steps))


def shortened(tree: dict[str, Any], steps: int) -> dict[str, Any]:
    """`tree` with that many steps; the critic's warm-up ends before the last one."""
    ppo = tree["ppo"]
    return tree | {"steps": steps, "ppo": ppo | {"value_warmup_steps": min(ppo["value_warmup_steps"], steps - 1)}}


def _overcommit(spec: RunSpec, chosen: int | None) -> dict[str, Any]:
    """Settings of Δ: fixed at `chosen`, else the spec's, else fixed at B ÷ 4 if the spec defers nothing."""
    settings = spec.overlap.overcommit.model_dump(mode="json")
    if chosen is None and spec.overlap.inter_step != "off":
        return settings
    if chosen is None:
        chosen = max(1, spec.ppo.batch_size // DEFAULT_OVERCOMMIT_SHARE)
    return settings | {"controller": "fixed", "initial": chosen, "min": 0, "max": chosen}


@dataclass(frozen=True, slots=True)
class Target:
    """The end of a run: `steps` PPO steps of a sequential run, more if tokens are stale.

    `staleness_cost`: additional share of steps at a deferred-token share of 1 (0: a stale token is worth as much as a fresh one).
    """

    steps: int
    staleness_cost: float = 0.0

    def steps_with(self, stale_share: float) -> float:
        """Steps to the target when this share of the trained tokens is stale."""
        return self.steps * (1 + self.staleness_cost * stale_share)


@dataclass(frozen=True, slots=True)
class Row:
    """Means per step of one schedule. `bubble` by device; `problem`: why the schedule is impossible, with no other fields."""

    schedule: str
    problem: str | None = None
    step_s: float = 0.0
    us_per_token: float = 0.0
    tokens_per_s: float = 0.0
    bubble: dict[str, float] | None = None
    utilization: float = 0.0
    overlap_factor: float = 0.0
    occupancy: float = 0.0
    overcommit: float = 0.0
    deferred_share: float = 0.0
    stale_share: float = 0.0
    age_max: float = 0.0
    response_tokens: float = 0.0
    hours_to_target: float = 0.0
    device_hours: float = 0.0
    speedup: float = 0.0
    decode_share: float = 0.0  # of the step's time
    deferred_age: float = 0.0  # mean age of the deferred answers
    skew: float = 0.0  # share of the step that an actor's device waits for slower ranks

    def as_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)


def with_speedups(rows: list[Row]) -> list[Row]:
    """The rows with their speed-up over the sequential schedule, if it is among them.

    Time to the target per trained token, baseline ÷ this schedule: shorter answers in the first steps are no speed-up.
    """
    base = next((row for row in rows if row.schedule == BASELINE and not row.problem), None)
    if base is None:
        return rows
    filled = []
    for row in rows:
        known = {name: getattr(row, name) for name in row.__slots__}
        steps = row.hours_to_target / row.step_s if row.step_s else 0.0
        base_steps = base.hours_to_target / base.step_s
        speedup = base.us_per_token * base_steps / (row.us_per_token * steps) if steps else 0.0
        filled.append(Row(**known | {"speedup": speedup}))
    return filled


def warm_up(spec: RunSpec, steps: int) -> int:
    """Number of first steps to leave out, until the pool has its usual mix of ages."""
    return min(spec.overlap.max_age + 1, steps - 1)


def summary(schedule: str, metrics: list[dict[str, float]], devices: Devices, target: Target) -> Row:
    """A row from the metrics of some steps."""

    def mean(name: str) -> float:
        return fmean(step.get(name, 0.0) for step in metrics)

    seconds = sum(step["timing_s/step"] for step in metrics)
    tokens = sum(step["perf/total_num_tokens"] for step in metrics)
    bubble = {device: mean(f"bubble/{device}") for device in devices.names}
    stale = mean("oppo/deferred_token_share")
    hours = target.steps_with(stale) * seconds / len(metrics) / 3600
    return Row(
        schedule, None, seconds / len(metrics), 1e6 * seconds / tokens, tokens / seconds, bubble, 1 - fmean(bubble.values()),
        mean("overlap_factor"), mean("decode_occupancy"), mean("oppo/overcommit"), mean("oppo/deferred_share"), stale,
        max(step["oppo/age_max"] for step in metrics), mean("response_length/mean"), hours, hours * len(devices.names),
        decode_share=mean("timing_s/gen") * len(metrics) / seconds,
        deferred_age=mean("oppo/age_mean") / mean("oppo/deferred_share") if mean("oppo/deferred_share") else 0.0,
        skew=fmean(mean(f"idle_s/{device}/tail") for device in devices.group(ACTOR_GROUP)) * len(metrics) / seconds,
    )  # fmt: skip

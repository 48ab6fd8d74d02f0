"""The schedules that are compared, each a variant of one spec; Δ, C, `max_age` and the controllers stay those of the spec."""

from __future__ import annotations

from typing import Any

from oppo_contract.spec import RunSpec, load_spec

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
DEFAULT_OVERCOMMIT_SHARE = 4  # Δ = B ÷ 4 where the spec defers nothing and so says nothing of Δ


def variant(spec: RunSpec, schedule: str, steps: int | None = None, **overlap: Any) -> RunSpec:
    """`spec` with another schedule, without the timeline and the samples that nobody looks at.

    Raises:
        SpecError: the spec's other settings do not allow this schedule; the message names them.
    """
    tree = spec.model_dump(mode="json")
    tree["overlap"] |= SCHEDULES[schedule] | overlap
    if tree["overlap"]["inter_step"] != "off":
        tree["overlap"]["overcommit"] = _overcommit(spec)
    tree["logging"] |= {"samples_per_step": 0, "spans_every": 10**9}
    tree["steps"] = steps or spec.steps
    return load_spec(tree)


def _overcommit(spec: RunSpec) -> dict[str, Any]:
    """The spec's Δ; where it defers nothing, a fixed quarter of B."""
    settings = spec.overlap.overcommit.model_dump(mode="json")
    if spec.overlap.inter_step != "off":
        return settings
    chosen = max(1, spec.ppo.batch_size // DEFAULT_OVERCOMMIT_SHARE)
    return settings | {"controller": "fixed", "initial": chosen, "min": 0, "max": chosen}

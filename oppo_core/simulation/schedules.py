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


def variant(spec: RunSpec, schedule: str, steps: int | None = None, overcommit: int | None = None) -> RunSpec:
    """`spec` with another schedule, without the timeline and the samples that nobody looks at; `overcommit`: a fixed Δ.

    Raises:
        SpecError: the spec's other settings do not allow this schedule; the message names them.
    """
    tree = spec.model_dump(mode="json")
    tree["overlap"] |= SCHEDULES[schedule]
    if tree["overlap"]["inter_step"] != "off":
        tree["overlap"]["overcommit"] = _overcommit(spec, overcommit)
    if tree["overlap"]["inter_step"] != "defer":
        tree["overlap"]["kv_after_update"] = "recompute"  # nothing is kept where nothing is deferred
    tree["logging"] |= {"samples_per_step": 0, "spans_every": 10**9}
    return load_spec(shortened(tree, steps or spec.steps))


def shortened(tree: dict[str, Any], steps: int) -> dict[str, Any]:
    """`tree` with that many steps, the last of which trains the actor at the latest."""
    ppo = tree["ppo"]
    return tree | {"steps": steps, "ppo": ppo | {"value_warmup_steps": min(ppo["value_warmup_steps"], steps - 1)}}


def _overcommit(spec: RunSpec, chosen: int | None) -> dict[str, Any]:
    """A fixed Δ, or the spec's; where that defers nothing, a fixed quarter of B."""
    settings = spec.overlap.overcommit.model_dump(mode="json")
    if chosen is None and spec.overlap.inter_step != "off":
        return settings
    if chosen is None:
        chosen = max(1, spec.ppo.batch_size // DEFAULT_OVERCOMMIT_SHARE)
    return settings | {"controller": "fixed", "initial": chosen, "min": 0, "max": chosen}

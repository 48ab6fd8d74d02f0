"""Settings that a worker of an earlier wire version does not know, or does not accept empty.

A stored spec contains every setting. An older engine rejects unknown ones, so those that have their default are not sent to it:
it does the same without them. Where a setting may be empty now, the older engine uses its own default. A setting with another
value is sent: its run fails there with the setting's name, and needs an updated worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By dotted path: the wire version (oppo_contract.wire) of the first worker that knows the default, and the default.
SETTINGS_ADDED_IN: dict[str, tuple[int, object]] = {
    "budget.max_repetition": (5, None),
    "budget.min_entropy": (5, None),
    "budget.patience": (5, 1),
    "data.columns": (5, None),
    "evaluation.columns": (5, None),
    "overlap.chunk.size": (5, None),
    "ppo.clip_range_high": (5, None),
    "ppo.critic_learning_rate": (5, None),
    "ppo.dynamic_sampling": (5, 0),
    "ppo.learning_rate": (5, None),
    "ppo.loss_aggregation": (5, "token_mean"),
    "ppo.tis_floor": (5, 0.0),
    "ppo.tis_outside": (5, "clamp"),
    "training.retained_passes": (5, 1),
}


def spec_for_version(spec: Mapping[str, Any], wire_version: int) -> dict[str, Any]:
    """The spec without newer settings that have their default, for a worker of this version. `spec` is not changed."""
    result = dict(spec)
    for path, (since, default) in SETTINGS_ADDED_IN.items():
        if wire_version < since:
            result = _without(result, path.split("."), default)
    return result


def _without(section: dict[str, Any], path: list[str], default: object) -> dict[str, Any]:
    key, *rest = path
    if key not in section:
        return section
    value = section[key]
    if rest:
        return {**section, key: _without(value, rest, default)} if isinstance(value, dict) else section
    return {name: each for name, each in section.items() if name != key} if value == default else section

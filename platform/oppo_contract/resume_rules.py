"""Which settings may change when a run resumes from a checkpoint or is forked from one (docs/operations.md).

A setting may change if the saved state is still valid under the new value. The longest rule that matches a path decides. Checked
by the platform at submit, and by the engine before it loads a checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oppo_contract.spec import RunSpec

NEW_RUN = "start a new run from the trained actor (`oppo export`)"
ALLOWED = (
    "name", "fork", "steps", "ppo", "overlap", "training", "evaluation", "resources", "queue", "retries", "secrets", "budget",
    "checkpoints", "logging", "models.reward.http",
)  # fmt: skip
REFUSED = {
    "version": ("the state has another spec version", NEW_RUN),
    "seed": ("the sampling of unfinished responses depends on it", NEW_RUN),
    "models": ("weights and optimizer state belong to these models", NEW_RUN),
    "data": ("the prompt position depends on the order of these prompts", "use the same prompts, or " + NEW_RUN),
    "rollout": ("unfinished responses were started with it", NEW_RUN),
    "resources.dtype": ("weights and optimizer state were saved in it", NEW_RUN),
    "ppo.algorithm": ("responses in flight and the critic's state belong to the other algorithm", NEW_RUN),
    "ppo.group_size": ("responses in flight belong to groups of that size", NEW_RUN),
    "ppo.batch_size": ("the responses in flight were started for batches of that size", NEW_RUN),
    "ppo.normalize_scores": ("the running statistics belong to the whole run", NEW_RUN),
    "ppo.ema_decay": ("the moving average belongs to the whole run", NEW_RUN),
    "ppo.pretraining": ("the text position depends on these texts", "only its coefficient may change; otherwise " + NEW_RUN),
    "overlap.inter_step": ("the responses in flight were started in that mode", NEW_RUN),
}
ALLOWED_BELOW_REFUSED = (
    "ppo.pretraining.coefficient",
    "rollout.vllm_memory_share",
    "rollout.vllm_sleep",
    "models.reward.memory_share",
)


@dataclass(frozen=True, slots=True)
class Change:
    """A setting's value in the checkpoint and in the new spec."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.old)} → {_shown(self.new)}"


def diff_specs(saved: RunSpec, requested: RunSpec) -> list[Change]:
    """Every setting that differs, in the order of the spec."""
    return list(_differences("", saved.model_dump(mode="json"), requested.model_dump(mode="json")))


def refusing_rule(path: str) -> str | None:
    """The key of `REFUSED` that forbids a change of `path`; None if it may change."""
    kinds = [(rule, True) for rule in REFUSED] + [(rule, False) for rule in ALLOWED + ALLOWED_BELOW_REFUSED]
    matching = [(len(rule), rule, refused) for rule, refused in kinds if matches_rule(path, rule)]
    _, rule, refused = max(matching)
    return rule if refused else None


def max_in_flight(spec: RunSpec) -> int:
    """Maximum number of responses in flight: (B + Δ_max)·G, or B·G without deferral."""
    return _pool_size(spec, spec.overlap.overcommit.max)


def max_checkpointed(spec: RunSpec) -> int:
    """Maximum number of responses in flight in a mid-step checkpoint of this run.

    Between two steps at most Δ_max·G are in flight, which always fit.
    """
    bounds = spec.overlap.overcommit
    return _pool_size(spec, bounds.initial if bounds.controller == "fixed" else bounds.max)


def min_overcommit(in_flight: int, spec: RunSpec) -> int:
    """The smallest `overlap.overcommit.max`, in groups, whose pool holds `in_flight` responses."""
    return max(0, math.ceil((in_flight - spec.ppo.rows) / spec.ppo.group_size))


def _pool_size(spec: RunSpec, overcommit: int) -> int:
    return spec.ppo.rows + (overcommit * spec.ppo.group_size if spec.overlap.inter_step != "off" else 0)


def matches_rule(path: str, rule: str) -> bool:
    """Whether `path` is `rule` or below it."""
    return path == rule or path.startswith(rule + ".")


def _differences(path: str, old: Any, new: Any) -> Iterable[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(f"{path}.{key}" if path else key, old.get(key), new.get(key))
    elif old != new:
        yield Change(path, old, new)


def _shown(value: Any) -> str:
    text = "empty" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "…"

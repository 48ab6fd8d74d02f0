"""Which settings a run may have otherwise than the run that wrote the checkpoint it begins with, field by field.

The law of resumed attempts and of forks alike (docs/operations.md): a setting may change where the saved state still means the
same under the new value. Of a path's rules the longest one counts. Asked at submit by the platform, and by the engine before it
loads anything.
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
# From the next step on, or at once where nothing computes differently.
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
    """A setting's value in the checkpoint and now."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {_said(self.old)} → {_said(self.new)}"


def diff_specs(saved: RunSpec, asked: RunSpec) -> list[Change]:
    """Every setting that differs, by path."""
    return list(_differences("", saved.model_dump(mode="json"), asked.model_dump(mode="json")))


def refusing_rule(path: str) -> str | None:
    """The rule of `REFUSED` that forbids a change of `path`; None when it may change."""
    kinds = [(rule, True) for rule in REFUSED] + [(rule, False) for rule in ALLOWED + ALLOWED_BELOW_REFUSED]
    matching = [(len(rule), rule, refused) for rule, refused in kinds if matches_rule(path, rule)]
    _, rule, refused = max(matching)
    return rule if refused else None


def max_in_flight(spec: RunSpec) -> int:
    """Answers that may be in flight at once: (B + Δ_max)·G, or B·G where none is deferred."""
    return _places(spec, spec.overlap.overcommit.max)


def max_checkpointed(spec: RunSpec) -> int:
    """Answers that a checkpoint may hold which this run wrote in the middle of a step: those that it tops its pool up to.

    Between two steps at most Δ_max·G are left, for which a batch alone has room.
    """
    bounds = spec.overlap.overcommit
    return _places(spec, bounds.initial if bounds.controller == "fixed" else bounds.max)


def min_overcommit(in_flight: int, spec: RunSpec) -> int:
    """The lowest `overlap.overcommit.max` under which there is room for so many answers, in units of the pool: groups."""
    return max(0, math.ceil((in_flight - spec.ppo.rows) / spec.ppo.group_size))


def _places(spec: RunSpec, overcommit: int) -> int:
    return spec.ppo.rows + (overcommit * spec.ppo.group_size if spec.overlap.inter_step != "off" else 0)


def matches_rule(path: str, rule: str) -> bool:
    """Whether `path` is `rule` or lies below it."""
    return path == rule or path.startswith(rule + ".")


def _differences(path: str, old: Any, new: Any) -> Iterable[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(f"{path}.{key}" if path else key, old.get(key), new.get(key))
    elif old != new:
        yield Change(path, old, new)


def _said(value: Any) -> str:
    text = "empty" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "…"

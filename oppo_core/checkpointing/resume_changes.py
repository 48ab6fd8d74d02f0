"""What a resumed run does otherwise than the run that wrote its checkpoint; what it may is `oppo_contract.resume_rules`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from oppo_contract.resume_rules import (
    ALLOWED,
    REFUSED,
    Change,
    diff_specs,
    matches_rule,
    max_in_flight,
    min_overcommit,
    refusing_rule,
)
from oppo_contract.spec import RunSpec
from oppo_core.control.controllers import ChunkState

if TYPE_CHECKING:
    from oppo_core.engine.state import Engine

__all__ = ["ALLOWED", "REFUSED", "Change", "apply", "diff_specs", "matches_rule", "refusals", "refusing_rule"]


def refusals(changed: Iterable[Change], in_flight: int, spec: RunSpec) -> list[str]:
    """One complaint, with its reason and its remedy, for every change that cannot be: [] when the run may go on.

    Args:
        in_flight: sequences in the pools of all ranks that wrote the checkpoint.
    """
    said = []
    for change in changed:
        rule = refusing_rule(change.path)
        if rule is not None:
            reason, remedy = REFUSED[rule]
            said.append(f"{change} cannot change, because {reason}; set it back, or {remedy}")
    if not said and in_flight > max_in_flight(spec):
        said.append(
            f"{in_flight} answers are in flight and there is room for {max_in_flight(spec)}: raise overlap.overcommit.max to"
            f" {min_overcommit(in_flight, spec)} or more, and lower it once the pool has shrunk (a lower Δ evicts nothing)"
        )
    return said


def apply(changed: Iterable[Change], engine: Engine) -> None:
    """Let restored state follow settings whose old value it carries: the KL coefficient, Δ, C, and what scores are worth."""
    spec, paths = engine.spec, {change.path for change in changed}
    fixed_now = "ppo.kl.controller" in paths and spec.ppo.kl.controller == "fixed"  # where the controller had taken it is past
    if fixed_now or "ppo.kl.coefficient" in paths:
        engine.progress.kl_coefficient = spec.ppo.kl.coefficient
    bounds = spec.overlap.overcommit
    if any(matches_rule(path, "overlap.overcommit") for path in paths) and spec.overlap.inter_step != "off":
        wanted = bounds.initial if bounds.controller == "fixed" else engine.overcommit.overcommit
        engine.overcommit.overcommit = min(max(wanted, bounds.min), bounds.max)
    if any(matches_rule(path, "overlap.chunk") for path in paths):
        engine.chunk = ChunkState(spec.overlap.chunk.size if "overlap.chunk.size" in paths else engine.chunk.size)
    if paths & {"evaluation", "evaluation.prompts", "evaluation.prompt_field", "evaluation.count", "evaluation.greedy"}:
        engine.run_score.reset_evaluations()

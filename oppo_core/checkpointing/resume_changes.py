"""Applies spec changes to a resumed run; which changes are allowed is in `oppo_contract.resume_rules`."""

from __future__ import annotations

from collections.abc import Iterable

from oppo_contract.resume_rules import REFUSED, Change, matches_rule, max_in_flight, min_overcommit, refusing_rule
from oppo_contract.spec import RunSpec
from oppo_core.control.controllers import ChunkState
from oppo_core.engine.state import Engine


def find_refusals(changes: Iterable[Change], in_flight: int, spec: RunSpec) -> list[str]:
    """A message with reason and remedy for each change that is not allowed.

    Args:
        in_flight: responses in the checkpoint's pool.
    """
    refusals = []
    for change in changes:
        rule = refusing_rule(change.path)
        if rule is not None:
            reason, remedy = REFUSED[rule]
            refusals.append(f"{change} cannot change, because {reason}; set it back, or {remedy}")
    if not refusals and in_flight > max_in_flight(spec):
        refusals.append(
            f"the checkpoint has {in_flight} responses in flight, but the spec allows {max_in_flight(spec)}: raise"
            f" overlap.overcommit.max to {min_overcommit(in_flight, spec)} or more, and lower it once the pool has shrunk (a"
            " lower Δ evicts nothing)"
        )
    return refusals


def apply_changes(changes: Iterable[Change], engine: Engine) -> None:
    """Update restored state that holds the old value of a changed setting: KL coefficient, Δ, C, and evaluation scores."""
    spec, paths = engine.spec, {change.path for change in changes}
    controller_removed = "ppo.kl.controller" in paths and spec.ppo.kl.controller == "fixed"
    if controller_removed or "ppo.kl.coefficient" in paths:
        engine.progress.kl_coefficient = spec.ppo.kl.coefficient
    bounds = spec.overlap.overcommit
    if any(matches_rule(path, "overlap.overcommit") for path in paths) and spec.overlap.inter_step != "off":
        overcommit = bounds.initial if bounds.controller == "fixed" else engine.overcommit.overcommit
        engine.overcommit.overcommit = min(max(overcommit, bounds.min), bounds.max)
    if any(matches_rule(path, "overlap.chunk") for path in paths):
        engine.chunk = ChunkState(spec.initial_chunk_size if "overlap.chunk.size" in paths else engine.chunk.size)
    if any(matches_rule(path, "evaluation.columns") for path in paths) or paths & {
        "evaluation",
        "evaluation.prompts",
        "evaluation.prompt_field",
        "evaluation.count",
        "evaluation.greedy",
    }:
        engine.run_score.reset_evaluations()

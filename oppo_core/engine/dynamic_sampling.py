"""Dynamic sampling (DAPO, arXiv 2503.14476, §3.2): a group whose responses all have the same score is replaced by a new one.

Its advantages are 0, so it would train nothing. The score is the shaped one, without the KL penalty.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from oppo_core.engine.state import Engine
from oppo_core.ppo.reward_shaping import shaped_scores
from oppo_core.rollout.pool import Group
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.step_state import StepState


def replace_uniform_groups(engine: Engine, batch: StepState, version: int) -> bool:
    """Drop groups of equal scores from the complete batch and start new ones; returns whether there were any.

    At most `ppo.dynamic_sampling` times a step; groups of equal scores that are left are trained.
    """
    if batch.replacements >= engine.spec.ppo.dynamic_sampling:
        return False
    groups = [group for group in engine.pool.batch_groups(batch.finishers) if group[0].sequence_id not in batch.varied]
    scores = _scores(engine, [sequence for group in groups for sequence in group])
    uniform = [group for group in groups if _is_uniform(engine, group, [scores[s.sequence_id] for s in group])]
    dropped = {sequence.sequence_id: sequence for group in uniform for sequence in group}
    batch.varied |= {group[0].sequence_id for group in groups} - dropped.keys()
    if not dropped:
        return False
    batch.replacements += 1
    batch.replaced += len(uniform)
    engine.cohorts.finish(s for s in batch.finishers if s.sequence_id in dropped)
    batch.finishers = [s for s in batch.finishers if s.sequence_id not in dropped]
    engine.pool.drop(dropped)
    engine.release(dropped.values())
    engine.cohorts.begin(version, len(engine.pool.top_up(engine.pool.overcommit, version, engine.new_group)))
    return True


def _scores(engine: Engine, sequences: list[Sequence]) -> dict[int, float]:
    """The raw score of each sequence, gathered from all ranks."""
    own = engine.local(sequences)
    if not engine.layout.streams:
        engine.scorers.extend(engine.deltas.new_deltas(own), 0)
    engine.scorers.start_collect([s.sequence_id for s in own])
    with engine.trace.wait("score"):
        scored = engine.scorers.wait_collect()
    known = [scored[s.sequence_id].score if s.remote_length is None else 0.0 for s in sequences]
    with engine.trace.wait("tail") if engine.ranks.world > 1 else nullcontext():
        return dict(zip((s.sequence_id for s in sequences), engine.ranks.total(known), strict=True))


def _is_uniform(engine: Engine, group: Group, scores: list[float]) -> bool:
    """Whether all shaped scores are equal. Scores that are not finite are an error of the whole batch, which is raised later."""
    raw_G = torch.tensor(scores, dtype=torch.float64)
    if not bool(raw_G.isfinite().all()):
        return False
    scores_G = shaped_scores(raw_G, group, engine.spec.ppo, engine.moments.updated(raw_G))
    return bool((scores_G == scores_G[0]).all())

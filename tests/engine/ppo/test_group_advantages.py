"""Groups: advantages against definitions and peers, separate random numbers per member, and no critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_contract.spec import Ppo
from oppo_core.engine.layout import build_layout
from oppo_core.models.microbatching import mini_batch_rows
from oppo_core.ppo.group_advantages import group_advantages, grpo, rloo
from tests.engine.ppo.oracle import against_the_group

GROUPS = st.integers(2, 6).flatmap(
    lambda size: st.lists(st.lists(st.floats(-3, 3, width=32), min_size=size, max_size=size), min_size=1, max_size=4)
)
ALGORITHMS = [("grpo", True), ("grpo", False), ("rloo", True)]
FREE = {
    "models": {"critic": "actor"},
    "ppo": {"critic_learning_rate": 1e-5, "algorithm": "grpo", "batch_size": 4, "group_size": 3},
}


@pytest.mark.parametrize(("algorithm", "by_std"), ALGORITHMS)
@settings(max_examples=100, deadline=None)
@given(groups=GROUPS)
def test_advantages_are_those_of_the_papers(algorithm: Any, by_std: bool, groups: list[list[float]]) -> None:
    ppo = Ppo(algorithm=algorithm, group_size=len(groups[0]), batch_size=len(groups), normalize_advantages_by_std=by_std)
    ours = group_advantages(torch.tensor(groups, dtype=torch.float64).flatten(), ppo)
    wanted = [a for group in groups for a in against_the_group(group, group, ppo)]
    assert ours.tolist() == pytest.approx(wanted, abs=1e-6 if by_std and algorithm == "grpo" else 1e-12)
    for group, told in zip(groups, ours.view(len(groups), -1), strict=True):
        assert float(told.sum()) == pytest.approx(0, abs=1e-6)
        if len(set(group)) == 1:
            assert told.abs().max() < 1e-6, "equal rewards give advantage 0"


@settings(max_examples=50, deadline=None)
@given(groups=GROUPS)
def test_peers_agree(groups: list[list[float]]) -> None:
    """The formulas of verl's and TRL 1.12's GRPO and RLOO, re-derived.

    verl: (s − mean) ÷ (std + 1e-6), torch.std, hence unbiased; TRL: the same with 1e-4. RLOO: s·G/(G−1) − mean·G/(G−1) in the
    one, s less (sum − s)/(G−1) in the other.
    """
    rewards = torch.tensor(groups, dtype=torch.float64)
    size = rewards.shape[-1]
    mean, std = rewards.mean(-1, keepdim=True), rewards.std(-1, keepdim=True)
    torch.testing.assert_close(grpo(rewards, True), (rewards - mean) / (std + 1e-6), rtol=1e-9, atol=1e-9)
    gap = (grpo(rewards, True) - (rewards - mean) / (std + 1e-4)).abs()
    assert (gap <= 1e-4 * (rewards - mean).abs() / (std.square() + 1e-10) + 1e-9).all(), "TRL differs by its ε alone"
    torch.testing.assert_close(rloo(rewards), (rewards - mean) * size / (size - 1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_mini_batches_never_split_a_group(group: int, parts: int) -> None:
    rows = mini_batch_rows(6 * group, parts, 3, 4, 1, group)
    assert sorted(row for part in rows for row in part) == list(range(6 * group))
    for part in rows:
        assert len(part) == 6 * group // parts
        assert len({row // group for row in part}) == 6 // parts


@pytest.mark.parametrize("inter", ["off", "defer", "tail_batch"])
def test_members_answer_one_prompt_each_with_its_own_randomness(world: Any, tmp_path: Path, inter: str) -> None:
    spec = world.spec(FREE, {"steps": 5, "overlap": {"inter_step": inter}})
    run = world.run(spec, tmp_path, inline=True)
    assert run.engine.scorers.critic is None
    assert run.engine.scorers.trainer is None
    assert not list(tmp_path.rglob("*critic*"))
    different = 0
    for step in run.steps:
        sequences = step.experience.sequences
        assert len(sequences) == spec.ppo.rows == 12
        for first in range(0, 12, 3):
            members = sequences[first : first + 3]
            assert [s.sequence_id for s in members] == [members[0].sequence_id + n for n in range(3)]
            assert members[0].sequence_id % 3 == 0
            assert {(s.prompt_index, s.age, s.cohort) for s in members} == {
                (members[0].prompt_index, members[0].age, members[0].cohort)
            }
            different += len({tuple(s.response) for s in members})
        rewards = step.experience.rewards.sum(-1)
        torch.testing.assert_close(step.experience.raw_advantages[:, 0], group_advantages(rewards, spec.ppo))
        assert torch.equal(step.experience.advantages, step.experience.raw_advantages), "group advantages are not whitened"
        assert (inter == "defer") or not step.experience.stale.any()
    assert different > 5 * 12 * 0.9, "the members of a group are equal"
    layout = build_layout(spec, torch.device("cpu"), 2, 16)
    assert {role for _, role in layout.lanes()} == {"actor", "reward", "reference"}


def test_tail_batching_counts_discarded_tokens(world: Any, tmp_path: Path) -> None:
    """Every decoded token is trained or counted as wasted, and every step is on-policy."""
    spec = world.spec({"steps": 8, "overlap": {"inter_step": "tail_batch", "overcommit": {"initial": 3}}})
    run = world.run(spec, tmp_path, inline=True)
    told = [event.metrics for event in run.events if event.kind == "step"]
    kinds = [step["oppo/overcommit"] for step in told]
    assert kinds == [3, 3, 0, 3, 3, 0, 3, 3], "three prompts are postponed per step; the sixth completes a batch"
    for step, metrics in zip(run.steps, told, strict=True):
        assert not step.experience.stale.any()
        assert {s.age for s in step.experience.sequences} == {0}
        assert bool((step.experience.weights[step.experience.mask] == 1).all())
        assert (metrics["oppo/wasted_tokens"] > 0) == (metrics["oppo/overcommit"] > 0)
        decoded = metrics["perf/total_num_tokens"] + metrics["oppo/wasted_tokens"]
        assert decoded <= metrics["response_length/max"] * (6 + metrics["oppo/overcommit"])
    assert [step["oppo/queued"] for step in told] == [3, 6, 0, 3, 6, 0, 3, 6]
    assert {s.cohort for s in run.steps[2].experience.sequences} == {0, 1}, "the first two steps' prompts"

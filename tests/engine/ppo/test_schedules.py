"""Learning-rate schedules, score shaping and random streams as pure functions."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_contract.spec import Ppo
from oppo_core.ppo.batch_rows import BatchRows
from oppo_core.ppo.losses import scale_to_unit_variance
from oppo_core.ppo.reward_shaping import ScoreMoments
from oppo_core.rng import Use, generator
from oppo_core.training.lr_schedule import Rates, actor_rates, critic_rates

MANY = settings(max_examples=100, deadline=None)
NUMBER = st.floats(-1e3, 1e3, width=32)


@MANY
@given(
    steps=st.integers(1, 60), warmup=st.integers(0, 20), start=st.integers(0, 20), final=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
)  # fmt: skip
def test_a_rate_rises_to_its_peak_and_falls_to_its_end(steps: int, warmup: int, start: int, final: float, schedule: Any) -> None:
    rates = Rates(2e-3, warmup, schedule, final, start, steps)
    told = [rates.at(step) for step in range(steps)]
    assert told[:start] == [0.0] * min(start, steps)
    rising, falling = told[start : start + max(warmup, 1)], told[start + max(warmup, 1) - 1 :]
    assert rising == pytest.approx([2e-3 * (t + 1) / max(warmup, 1) for t in range(len(rising))])
    assert all(one >= other - 1e-15 for one, other in itertools.pairwise(falling))
    if len(falling) > 1:
        assert falling[0] == pytest.approx(2e-3)
        assert falling[-1] == pytest.approx(2e-3 if schedule == "constant" else 2e-3 * final)


def test_halfway_down_the_two_schedules_meet_and_a_quarter_down_they_do_not() -> None:
    linear, cosine = (Rates(1.0, 0, kind, 0.2, 0, 9) for kind in ("linear", "cosine"))
    assert linear.at(4) == pytest.approx(0.6)
    assert cosine.at(4) == pytest.approx(0.6)
    assert linear.at(2) == pytest.approx(0.8)
    assert cosine.at(2) == pytest.approx(0.2 + 0.8 * (1 + 0.5**0.5) / 2)


def test_actor_and_critic_have_separate_schedules() -> None:
    ppo = Ppo(learning_rate=1e-4, critic_learning_rate=1e-3, warmup_steps=4, critic_schedule="linear", value_warmup_steps=3)
    actor, critic = actor_rates(ppo, 20, 1, False), critic_rates(ppo, 20, 1, False)
    assert [actor.at(step) for step in (2, 3, 6, 19)] == pytest.approx([0.0, 2.5e-5, 1e-4, 1e-4])
    assert [critic.at(step) for step in (0, 3, 19)] == pytest.approx([2.5e-4, 1e-3, 1e-4])
    own = critic_rates(ppo.model_copy(update={"critic_warmup_steps": 0}), 20, 1, False)
    assert own.at(0) == 1e-3


@MANY
@given(batches=st.lists(st.lists(NUMBER, min_size=1, max_size=6), min_size=1, max_size=6))
def test_merged_moments_are_those_of_all_scores(batches: list[list[float]]) -> None:
    moments = ScoreMoments()
    for batch in batches:
        moments = moments.updated(torch.tensor(batch, dtype=torch.float64))
    scores = [score for batch in batches for score in batch]
    assert moments.count == len(scores)
    assert moments.mean == pytest.approx(statistics.fmean(scores), abs=1e-9)
    if len(scores) > 1:
        assert moments.deviation**2 == pytest.approx(statistics.variance(scores) + 1e-8, rel=1e-9, abs=1e-9)
    else:
        assert moments.deviation == 1.0


@MANY
@given(rows=st.lists(st.lists(NUMBER, min_size=3, max_size=3), min_size=1, max_size=5), ends=st.lists(st.integers(1, 3)))
def test_scaled_rewards_keep_their_mean_and_have_unit_variance(rows: list[list[float]], ends: list[int]) -> None:
    rewards = torch.tensor(rows, dtype=torch.float64)
    mask = torch.arange(3) < torch.tensor((ends + [3] * len(rows))[: len(rows)])[:, None]
    scaled = scale_to_unit_variance(rewards, mask, BatchRows([]).whitening(rewards[mask]))
    before, after = rewards[mask], scaled[mask]
    assert float(after.mean()) == pytest.approx(float(before.mean()), abs=1e-6)
    if len(before) > 1 and float(before.var()) > 1e-3:
        assert float(after.var()) == pytest.approx(1.0, rel=1e-4)
    assert torch.equal(scaled[~mask], rewards[~mask])


def test_random_streams_of_different_uses_differ() -> None:
    drawn = {(use, index): tuple(generator(7, use, index).random(3)) for use in Use for index in (0, 1, 2**56 - 1)}
    assert len(set(drawn.values())) == len(drawn)
    assert drawn[Use.SAMPLING, 1] == tuple(generator(7, Use.SAMPLING, 1).random(3))
    assert drawn[Use.SAMPLING, 1] != tuple(generator(8, Use.SAMPLING, 1).random(3))


HEAD_START = {"ppo": {"value_warmup_steps": 3, "epochs": 2, "mini_batches": 2, "weight_decay": 0.1}, "steps": 4}


def test_the_actor_is_unchanged_during_critic_warmup(world: Any, tmp_path: Path) -> None:
    changes = {"overlap": {"intra_step": "off"}, "checkpoints": {"every_steps": 1, "keep": 10}}
    run = world.run(world.spec(HEAD_START, changes), tmp_path)
    first = {role: world.first_weights(run.engine.spec, role) for role in ("actor", "critic")}
    moved = {
        (role, step): [name for name, weight in first[role].items() if not torch.equal(run.weights(role, step)[name], weight)]
        for role in first
        for step in (1, 3, 4)
    }
    assert moved["actor", 1] == moved["actor", 3] == []
    assert moved["actor", 4]
    assert moved["critic", 1]
    steps = [event.metrics for event in run.events if event.kind == "step"]
    assert [name for name in steps[2] if name.startswith("actor/")] == ["actor/lr"]
    assert [step["actor/lr"] for step in steps] == [0.0, 0.0, 0.0, 3e-3]

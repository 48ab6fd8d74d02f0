"""Our equations against those of two peers, TRL 1.12 (PPOTrainer) and verl (core_algos), on random ragged batches.

Their definitions are reimplemented here one token at a time from their documentation and sources. Tests show the differences
between them and us:

- *Whitening.* All three use the unbiased variance and ε = 1e-8 inside of the root. TRL may keep the mean (`shift_mean=False`,
  for rewards; `ppo.whiten_rewards` here); verl always shifts. TRL whitens advantages over its response mask, verl over the
  tokens that were generated; without tools in between that is the same. TRL whitens what one process holds of a batch, verl
  and we whiten all of it.
- *GAE.* TRL runs through padding, where rewards and values are 0, verl carries value and trace across masked tokens; right-padded
  rows give the same. TRL puts the score one place behind the last response token, when there is room, and lets its value mask
  reach one token further, so its values have one more entry; here the score stands on the last token. Neither bootstraps.
- *KL.* TRL has k1 and k3, verl k1, k2 ("mse") and k3 ("low_var_kl"). verl clamps k3's log-ratio to ±20 and its result to ±10;
  we clamp the log-ratio to ±20 for all three and leave the result alone; TRL clamps nothing.
- *Policy loss.* The same clipped surrogate. verl clamps the log-ratio to ±20, as we do, TRL does not; verl always applies the
  dual clip (c = 3 by default), with us it is off by default, TRL has none. TRL takes the token mean of each micro-batch, we that
  of the mini-batch; here losses are compared a token.
- *Value loss.* All three take 0.5 · max(unclipped, clipped).
- *Adaptive KL.* verl's controller is ours (error clipped to ±0.2); TRL 1.12 has only a fixed coefficient.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_core.ppo.batch_rows import BatchRows
from oppo_core.ppo.losses import (
    adapted_kl_coefficient,
    gae,
    kl_estimate,
    policy_loss,
    scale_to_unit_variance,
    value_loss,
    whiten,
)

MANY = settings(max_examples=60, deadline=None)
NUMBER = st.floats(-3, 3, width=32)
ROWS = st.lists(st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=8), min_size=2, max_size=5)
Row = list[float]


def padded(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] float64, zeros behind, and the mask."""
    width = max(len(row) for row in rows)
    values = torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)
    return values, torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]


def number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


class Trl:
    """TRL 1.12's PPOTrainer."""

    @staticmethod
    def whitened(rows: list[Row], shift_mean: bool = True) -> list[Row]:
        tokens = [x for row in rows for x in row]
        mean = math.fsum(tokens) / len(tokens)
        biased = math.fsum((x - mean) ** 2 for x in tokens) / len(tokens)
        root = math.sqrt(biased * len(tokens) / (len(tokens) - 1) + 1e-8)
        return [[(x - mean) / root + (0.0 if shift_mean else mean) for x in row] for row in rows]

    @staticmethod
    def gae(rewards: Row, values: Row, gamma: float, lam: float, width: int) -> Row:
        """Through the padding too, whose rewards and values are 0."""
        r, v = ([*row, *[0.0] * (width - len(row))] for row in (rewards, values))
        trace, result = 0.0, []
        for t in range(width - 1, -1, -1):
            trace = r[t] + gamma * (v[t + 1] if t + 1 < width else 0.0) - v[t] + gamma * lam * trace
            result.insert(0, trace)
        return result[: len(rewards)]

    @staticmethod
    def kl(logp: float, reference: float, estimator: str) -> float:
        back = reference - logp
        return {"k1": -back, "k3": math.expm1(back) - back}[estimator]

    @staticmethod
    def policy_loss(log_ratio: float, advantage: float, clip: float) -> float:
        ratio = math.exp(log_ratio)
        return max(-advantage * ratio, -advantage * min(max(ratio, 1 - clip), 1 + clip))

    @staticmethod
    def value_loss(value: float, old: float, target: float, clip: float) -> float:
        near = min(max(value, old - clip), old + clip)
        return 0.5 * max((value - target) ** 2, (near - target) ** 2)


class Verl:
    """verl's core_algos."""

    @staticmethod
    def gae(rewards: Row, values: Row, mask: list[bool], gamma: float, lam: float) -> Row:
        """What follows a masked token is what followed before it: neither value nor trace changes there."""
        trace = following = 0.0
        result = []
        for t in range(len(mask) - 1, -1, -1):
            if mask[t]:
                trace = rewards[t] + gamma * following - values[t] + gamma * lam * trace
                following = values[t]
            result.insert(0, trace)
        return result

    @staticmethod
    def kl(logp: float, reference: float, estimator: str) -> float:
        if estimator == "k1":
            return logp - reference
        if estimator == "k2":
            return (logp - reference) ** 2 / 2
        back = min(max(reference - logp, -20.0), 20.0)
        return min(max(math.exp(back) - back - 1, -10.0), 10.0)

    @staticmethod
    def policy_loss(log_ratio: float, advantage: float, clip: float, dual: float = 3.0) -> float:
        clipped = Trl.policy_loss(min(max(log_ratio, -20.0), 20.0), advantage, clip)
        return min(clipped, -advantage * dual) if advantage < 0 else clipped

    @staticmethod
    def adapted(coefficient: float, kl: float, target: float, count: int, horizon: int) -> float:
        return coefficient + coefficient * min(max((kl - target) / target, -0.2), 0.2) * count / horizon


@MANY
@given(rows=ROWS, gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae(rows: list[list[tuple[float, float]]], gamma: float, lam: float) -> None:
    rewards, values = [[r for r, _ in row] for row in rows], [[v for _, v in row] for row in rows]
    (rewards_BT, mask), (values_BT, _) = padded(rewards), padded(values)
    advantages, returns = gae(rewards_BT, values_BT, mask, gamma, lam)
    for n, (r, v) in enumerate(zip(rewards, values, strict=True)):
        ours = advantages[n, : len(r)].tolist()
        assert ours == pytest.approx(Trl.gae(r, v, gamma, lam, mask.shape[1]), abs=1e-10)
        theirs = Verl.gae(rewards_BT[n].tolist(), values_BT[n].tolist(), mask[n].tolist(), gamma, lam)
        assert ours == pytest.approx(theirs[: len(r)], abs=1e-10)
        assert returns[n, : len(r)].tolist() == pytest.approx([a + x for a, x in zip(ours, v, strict=True)], abs=1e-10)


@MANY
@given(rows=ROWS)
def test_whitening_with_and_without_the_mean(rows: list[list[tuple[float, float]]]) -> None:
    plain = [[r for r, _ in row] for row in rows]
    values, mask = padded(plain)
    whitening = BatchRows([]).whitening(values[mask])
    for ours, theirs in (
        (whiten(values, mask, whitening), Trl.whitened(plain)),
        (scale_to_unit_variance(values, mask, whitening), Trl.whitened(plain, False)),
    ):
        assert ours[mask].tolist() == pytest.approx([x for row in theirs for x in row], rel=1e-7, abs=1e-7)


@MANY
@given(logp=st.floats(-9, 0), reference=st.floats(-9, 0))
def test_kl_estimators(logp: float, reference: float) -> None:
    estimators: list[Any] = ["k1", "k2", "k3"]
    for name in estimators:
        ours = float(kl_estimate(number(logp), number(reference), name))
        theirs = Verl.kl(logp, reference, name)
        if name != "k3" or theirs < 10:
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
        if name != "k2":
            assert ours == pytest.approx(Trl.kl(logp, reference, name), rel=1e-9, abs=1e-12)


def test_where_the_kl_estimators_differ() -> None:
    """k3 differs for large log-ratios: TRL's is unbounded, verl's is clamped to 10, ours at a log-ratio of 20."""
    ours = [float(kl_estimate(number(x), number(0.0), "k3")) for x in (-4.0, -25.0)]
    assert ours == pytest.approx([math.exp(4) - 5, math.exp(20) - 21])
    assert [Verl.kl(x, 0.0, "k3") for x in (-4.0, -25.0)] == [10.0, 10.0]
    assert Trl.kl(-25.0, 0.0, "k3") == pytest.approx(math.exp(25) - 26)


@MANY
@given(log_ratio=st.floats(-25, 25), advantage=NUMBER, clip=st.floats(0.01, 0.9), dual=st.floats(1.01, 6))
def test_policy_losses(log_ratio: float, advantage: float, clip: float, dual: float) -> None:
    def ours(bound: float | None) -> float:
        loss, _ = policy_loss(number(log_ratio), number(0.0), number(advantage), number(1.0), (clip, clip), bound)
        return float(loss)

    assert ours(dual) == pytest.approx(Verl.policy_loss(log_ratio, advantage, clip, dual), rel=1e-9, abs=1e-12)
    if abs(log_ratio) <= 20:
        assert ours(None) == pytest.approx(Trl.policy_loss(log_ratio, advantage, clip), rel=1e-9, abs=1e-12)
    elif advantage < -1e-3 and log_ratio > 20:
        assert ours(None) < Trl.policy_loss(log_ratio, advantage, clip), "TRL does not clamp the log-ratio"


@MANY
@given(value=NUMBER, old=NUMBER, target=NUMBER, clip=st.floats(0.01, 2))
def test_value_losses(value: float, old: float, target: float, clip: float) -> None:
    loss, _ = value_loss(number(value), number(old), number(target), clip)
    assert float(loss) == pytest.approx(Trl.value_loss(value, old, target, clip), rel=1e-9, abs=1e-12)


@MANY
@given(kl=st.floats(-1, 3), target=st.floats(0.01, 1), count=st.integers(1, 512), horizon=st.integers(512, 20_000))
def test_the_adaptive_kl_coefficient(kl: float, target: float, count: int, horizon: int) -> None:
    ours = adapted_kl_coefficient(0.3, kl, target, count, horizon)
    assert ours == pytest.approx(Verl.adapted(0.3, kl, target, count, horizon), rel=1e-12)

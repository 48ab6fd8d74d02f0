"""Each equation against its definition, on random ragged batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oppo_core.models.microbatching import COLUMNS_PER_TOKEN, PASS_COST_TOKENS, costs_on_gpu, mini_batch_rows, ragged_batches
from oppo_core.ppo.batch_rows import BatchRows
from oppo_core.ppo.losses import (
    adapted_kl_coefficient,
    gae,
    importance_weights,
    kl_estimate,
    policy_loss,
    shape_rewards,
    value_loss,
    whiten,
)
from tests.engine.ppo.oracle import double_sum_gae, whitened

MANY = settings(max_examples=100, deadline=None)
NUMBER = st.floats(-3, 3, width=32)


def padded(rows: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Rows as [B, T] float64 padded with garbage, and the mask."""
    width = max(len(row) for row in rows)
    values = torch.full((len(rows), width), 7.0, dtype=torch.float64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        values[number, : len(row)] = torch.tensor(row, dtype=torch.float64)
        mask[number, : len(row)] = True
    return values, mask


def unpadded(values: Tensor, mask: Tensor) -> list[list[float]]:
    return [row[chosen].tolist() for row, chosen in zip(values, mask, strict=True)]


ROWS = st.lists(st.lists(NUMBER, min_size=1, max_size=9), min_size=1, max_size=5)


@MANY
@given(rows=ROWS, data=st.data(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_is_the_double_sum(rows: list[list[float]], data: st.DataObject, gamma: float, lam: float) -> None:
    rewards = [data.draw(st.lists(NUMBER, min_size=len(row), max_size=len(row))) for row in rows]
    (values, mask), (reward_BT, _) = padded(rows), padded(rewards)
    advantages, returns = gae(reward_BT, values, mask, gamma, lam)
    for r, v, a, g in zip(rewards, rows, unpadded(advantages, mask), unpadded(returns, mask), strict=True):
        wanted = double_sum_gae(r, v, gamma, lam)
        assert a == pytest.approx(wanted, abs=1e-12)
        assert g == pytest.approx([x + y for x, y in zip(wanted, v, strict=True)], abs=1e-12)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@MANY
@given(rows=ROWS)
def test_whitening_over_the_tokens_of_the_whole_batch(rows: list[list[float]]) -> None:
    values, mask = padded(rows)
    result = whiten(values, mask, BatchRows([]).whitening(values[mask]))
    assert not result[~mask].any()
    if int(mask.sum()) == 1:
        assert result[mask].tolist() == [0.0]
        return
    for ours, wanted in zip(unpadded(result, mask), whitened(rows), strict=True):
        assert ours == pytest.approx(wanted, abs=1e-9)


@MANY
@given(rows=ROWS, scores=st.lists(NUMBER, min_size=5, max_size=5), coefficient=st.floats(0, 2))
def test_rewards_are_the_kl_penalty_and_the_score_on_the_last_token(
    rows: list[list[float]], scores: list[float], coefficient: float
) -> None:
    kl, mask = padded(rows)
    shaped = shape_rewards(torch.tensor(scores[: len(rows)], dtype=torch.float64), kl, mask, coefficient)
    for ours, row, score in zip(unpadded(shaped, mask), rows, scores, strict=False):
        assert ours == pytest.approx([-coefficient * k for k in row[:-1]] + [score - coefficient * row[-1]], abs=1e-12)
    assert not shaped[~mask].any()


@MANY
@given(logp=st.floats(-30, 0), reference=st.floats(-30, 0))
def test_kl_estimators(logp: float, reference: float) -> None:
    d = min(max(logp - reference, -20.0), 20.0)
    k3 = math.exp(-d) - 1 + d
    wanted: dict[Any, float] = {"k1": d, "k2": d * d / 2, "k3": k3, "k3+": k3}
    for name, value in wanted.items():
        ours = float(kl_estimate(*(torch.tensor(x, dtype=torch.float64) for x in (logp, reference)), name))
        assert ours == pytest.approx(value, rel=1e-12, abs=1e-12)
        assert name == "k1" or ours >= -1e-14 * max(1, d * d)


def test_the_kl_estimators_estimate_the_kl() -> None:
    """Weighted by the policy's own probabilities, k1 and k3 are the KL divergence itself."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.log_softmax(torch.randn(12, generator=generator, dtype=torch.float64), -1) for _ in range(2))
    exact = float((policy.exp() * (policy - reference)).sum())
    names: list[Any] = ["k1", "k3", "k3+"]
    for name in names:
        assert float((policy.exp() * kl_estimate(policy, reference, name)).sum()) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        ("k1", lambda p, r: 0 * p.sum()),
        ("k2", lambda p, r: (p.exp() * (p - r)).sum()),
        ("k3", lambda p, r: (r.exp() * (r - p)).sum()),
        ("k3+", lambda p, r: (p.exp() * (p - r)).sum()),
    ],
)
def test_expected_gradient_of_an_estimator_in_the_loss(estimator: Any, divergence: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Over all tokens of a vocabulary, sampled by the policy: zero for k1, that of a divergence for the others."""
    generator = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    policy, reference = torch.log_softmax(logits, -1), torch.log_softmax(other, -1)
    sampled = policy.detach().exp()  # the sampler is not differentiated
    (ours,) = torch.autograd.grad((sampled * kl_estimate(policy, reference, estimator)).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad(divergence(policy, reference), logits)
    assert torch.allclose(ours, exact, atol=1e-14)
    assert (float(exact.norm()) > 0.3) == (estimator != "k1")


@MANY
@given(
    log_ratio=st.floats(-30, 30), advantage=NUMBER, weight=st.floats(0, 2), clip=st.floats(0.01, 0.9),
    high=st.floats(0.01, 0.9), dual=st.one_of(st.none(), st.floats(1.01, 5)),
)  # fmt: skip
def test_policy_loss(
    log_ratio: float, advantage: float, weight: float, clip: float, high: float, dual: float | None
) -> None:  # fmt: skip
    logp, old, a, w = (torch.tensor([x], dtype=torch.float64) for x in (log_ratio - 40, -40.0, advantage, weight))
    loss, clipped = policy_loss(logp, old, a, w, (clip, high), dual)
    ratio = math.exp(min(max(log_ratio, -20), 20))
    wanted = -min(ratio * advantage, min(max(ratio, 1 - clip), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        wanted = -max(-wanted, dual * advantage)
    assert float(loss) == pytest.approx(wanted * weight, rel=1e-9, abs=1e-12)
    outside = ratio > 1 + high if advantage > 0 else ratio < 1 - clip
    if abs(ratio - 1 - high) > 1e-9 and abs(ratio - 1 + clip) > 1e-9 and abs(advantage) > 1e-6:
        assert bool(clipped) == outside


def test_only_clipped_or_bounded_tokens_have_no_gradient() -> None:
    logp = torch.tensor([0.5, -0.5, 3.0, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    loss, _ = policy_loss(logp, torch.zeros(5).double(), advantages, torch.ones(5).double(), (0.2, 0.2), 4.0)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    assert (gradient != 0).tolist() == [False, False, False, True, True]


@MANY
@given(value=NUMBER, old=NUMBER, target=NUMBER, clip=st.one_of(st.none(), st.floats(0.01, 2)))
def test_value_loss(value: float, old: float, target: float, clip: float | None) -> None:
    v, o, t = (torch.tensor([x], dtype=torch.float64) for x in (value, old, target))
    loss, clipped = value_loss(v, o, t, clip)
    plain = (value - target) ** 2
    if clip is None or abs(value - old) <= clip:
        assert float(loss) == pytest.approx(plain / 2)
        assert not bool(clipped)
        return
    bound = (old + math.copysign(clip, value - old) - target) ** 2
    assert float(loss) == pytest.approx(max(plain, bound) / 2)
    assert bool(clipped) == (bound > plain) or bound == pytest.approx(plain)


@MANY
@given(proximal=st.floats(-30, 0), behaviour=st.floats(-30, 0), corrected=st.booleans(), cap=st.floats(1, 5))
def test_importance_weights(proximal: float, behaviour: float, corrected: bool, cap: float) -> None:
    p, b = torch.tensor([proximal]).double(), torch.tensor([behaviour]).double()
    ours = float(importance_weights(p, b, torch.tensor([corrected]), (0.0, cap)))
    ratio = math.exp(min(max(float(p) - float(b), -20), 20))
    assert ours == pytest.approx(min(ratio, cap) if corrected else 1.0)


def test_weights_outside_the_bounds_are_clamped_masked_or_reject_the_response() -> None:
    ratios = torch.tensor([[0.5, 1.0, 4.0], [3.0, 3.0, 1.0], [1.0, 1.0, 9.0]], dtype=torch.float64)
    corrected = torch.tensor([[True, True, True], [True, True, True], [True, True, False]])
    clamped, masked, rejected = (
        importance_weights(ratios.log(), torch.zeros(3, 3).double(), corrected, (0.8, 1.5), outside)  # type: ignore[arg-type]
        for outside in ("clamp", "mask", "reject")
    )
    assert torch.allclose(clamped, torch.tensor([[0.8, 1, 1.5], [1.5, 1.5, 1], [1, 1, 1]]).double())
    assert torch.allclose(masked, torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 1, 1]]).double())
    # geometric means of the corrected tokens: 1.26, 2.08 and 1
    assert torch.allclose(rejected, torch.tensor([[0.8, 1, 1.5], [0, 0, 0], [1, 1, 1]]).double())


def test_weighted_kl_of_stale_tokens_has_the_gradient_of_the_kl() -> None:
    """With tokens of an older policy, weights within the bounds make the expected gradient exact; without them it is biased."""
    generator = torch.Generator().manual_seed(1)
    logits, old, other = (torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(3))
    old = logits + 0.1 * old
    logits.requires_grad_()
    policy, behaviour, reference = (torch.log_softmax(x, -1) for x in (logits, old, other))
    weights = importance_weights(policy.detach()[None], behaviour[None], torch.ones(1, 12).bool(), (0.0, 2.0))[0]
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    errors = []
    for factor in (weights, torch.ones(12).double()):
        loss = (behaviour.exp() * factor * kl_estimate(policy, reference, "k3+")).sum()
        (ours,) = torch.autograd.grad(loss, logits, retain_graph=True)
        errors.append(float((ours - exact).norm() / exact.norm()))
    assert errors[0] < 1e-12
    assert errors[1] > 0.05


@MANY
@given(weights=st.lists(st.floats(0.01, 2), min_size=1, max_size=20))
def test_effective_sample_share(weights: list[float]) -> None:
    share = BatchRows([]).effective_share(torch.tensor(weights, dtype=torch.float64))
    assert share == pytest.approx(sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)))
    assert 1 / len(weights) - 1e-12 <= share <= 1 + 1e-12
    assert BatchRows([]).effective_share(torch.zeros(3).double()) == 0


def test_the_adaptive_kl_coefficient_follows_the_error_within_a_fifth() -> None:
    assert adapted_kl_coefficient(0.1, 0.5, 0.5, 16, 1000) == pytest.approx(0.1)
    assert adapted_kl_coefficient(0.1, 0.55, 0.5, 16, 1000) == pytest.approx(0.1 * (1 + 0.1 * 0.016))
    assert adapted_kl_coefficient(0.1, 50.0, 0.5, 16, 1000) == pytest.approx(0.1 * (1 + 0.2 * 0.016))
    assert adapted_kl_coefficient(0.1, -1.0, 0.5, 16, 1000) == pytest.approx(0.1 * (1 - 0.2 * 0.016))


def cost_of(group: tuple[int, ...], lengths: list[int]) -> float:
    longest = max(lengths[row] for row in group)
    return PASS_COST_TOKENS + len(group) * longest * (1 + longest / COLUMNS_PER_TOKEN)


def cheapest(rows: tuple[int, ...], lengths: list[int], budget: int) -> float:
    """Least cost over all ways to split `rows` into groups within the budget."""
    if not rows:
        return 0.0
    first, others = rows[0], rows[1:]
    best = math.inf
    for size in range(len(others) + 1):
        for more in itertools.combinations(others, size):
            group = (first, *more)
            if len(group) > 1 and len(group) * max(lengths[row] for row in group) > budget:
                continue
            rest = tuple(row for row in others if row not in more)
            best = min(best, cost_of(group, lengths) + cheapest(rest, lengths, budget))
    return best


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6), budget=st.sampled_from([16, 300, 800, 5000]))
def test_ragged_batches_are_the_cheapest_of_all(lengths: list[int], budget: int) -> None:
    groups = ragged_batches(lengths, budget)
    ours = sum(cost_of(tuple(group), lengths) for group in groups)
    assert ours == pytest.approx(cheapest(tuple(range(len(lengths))), lengths, budget))


def test_rows_share_a_pass_when_launches_are_expensive() -> None:
    """A chunk of 32 rows of very different length: several passes on a CPU, one through a small network on a GPU."""
    new, seen = [32] * 32, [100 + 20 * row for row in range(32)]
    small, large = costs_on_gpu(24, 494_032_768, 896), costs_on_gpu(28, 7_615_616_512, 3584)
    assert len(ragged_batches(new, 4096, seen)) > 2
    assert len(ragged_batches(new, 4096, seen, small)) == 1
    assert large.a_pass < 1200 < 14_000 < small.a_pass


@MANY
@given(rows=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 400)), max_size=40), budget=st.integers(16, 900))
def test_ragged_batches_hold_each_row_once_within_the_budget(rows: list[tuple[int, int]], budget: int) -> None:
    lengths, columns = [n for n, _ in rows], [n + before for n, before in rows]
    for groups in (ragged_batches(lengths, budget), ragged_batches(lengths, budget, columns)):
        assert sorted(row for group in groups for row in group) == [row for row, n in enumerate(lengths) if n]
        for group in groups:
            assert len(group) == 1 or len(group) * max(lengths[row] for row in group) <= budget


@MANY
@given(size=st.sampled_from([1, 4, 12, 30]), parts=st.sampled_from([1, 2, 3]), step=st.integers(0, 99), epoch=st.integers(0, 3))
def test_mini_batches_split_the_batch_in_an_order_of_their_own(size: int, parts: int, step: int, epoch: int) -> None:
    parts = parts if size % parts == 0 else 1
    rows = mini_batch_rows(size, parts, 7, step, epoch)
    assert sorted(row for part in rows for row in part) == list(range(size))
    assert {len(part) for part in rows} == {size // parts}
    assert rows == mini_batch_rows(size, parts, 7, step, epoch)
    if size == 30 and parts > 1:
        assert rows != mini_batch_rows(size, parts, 7, step, epoch + 1)
        assert rows != mini_batch_rows(size, parts, 7, step + 1, epoch)

"""Sampling: the correct distribution, from random numbers that depend only on (seed, sequence_id, position)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_contract.spec import ModelSpec
from oppo_core.models.model_io import load_model
from oppo_core.rollout.decoder import Decoder, DecodeSettings
from oppo_core.rollout.sampling import sample, uniforms
from oppo_core.rollout.sequence import Sequence


def chi_square_limit(freedom: int, z: float) -> float:
    """Wilson and Hilferty's approximation of the chi-square quantile whose normal quantile is `z`."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    draws, generator = 200_000, torch.Generator().manual_seed(11)
    logits = 1.5 * torch.randn(20, generator=generator, dtype=torch.float64)
    numbers = torch.from_numpy(np.concatenate([uniforms(5, number, 500) for number in range(draws // 500)]))
    tokens, logp = sample(logits.expand(draws, -1), numbers, temperature)
    wanted = torch.softmax(logits / temperature, -1)
    expected = draws * wanted
    observed = torch.bincount(tokens, minlength=20).double()
    statistic = float(((observed - expected).square() / expected).sum())
    assert statistic < chi_square_limit(19, 3.1), "frequencies are off (one in a thousand by chance, and the seed is fixed)"
    torch.testing.assert_close(logp, wanted.log()[tokens], rtol=0, atol=1e-12)


def test_the_ends_of_the_unit_interval() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]] * 2, dtype=torch.float64)
    tokens, logp = sample(logits, torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64), 1.0)
    assert tokens.tolist() == [1, 2], "an impossible token was drawn"
    assert logp.tolist() == pytest.approx([math.log(0.5)] * 2)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), sequence=st.integers(0, 10**9), count=st.integers(1, 40), more=st.integers(0, 40))
def test_random_numbers_depend_on_their_position_only(seed: int, sequence: int, count: int, more: int) -> None:
    first = uniforms(seed, sequence, count)
    assert np.array_equal(first, uniforms(seed, sequence, count + more)[:count])
    assert ((first >= 0) & (first < 1)).all()
    assert not np.array_equal(first, uniforms(seed, sequence + 1, count))
    assert not np.array_equal(first, uniforms(seed + 1, sequence, count))


def test_random_numbers_of_neighbouring_sequences_are_uncorrelated() -> None:
    table = np.stack([uniforms(0, number, 200) for number in range(200)])
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02


def answers(world: Any, ids: list[int], slots: int, interrupt: int | None) -> dict[int, Sequence]:
    """Decode the sequences `ids` together to their ends; after `interrupt` rounds everything is prefilled again."""
    actor = load_model(ModelSpec(path="actor"), "lm", [world.folder], torch.float64, 0)
    decoder = Decoder(actor, DecodeSettings(3, 2, 0.9, 12, 60, 400), slots)
    sequences = [Sequence(i, 0, np.asarray([3 + i % 30] * (1 + i % 12))) for i in ids]
    decoder.begin(sequences)
    rounds = 0
    while decoder.live:
        decoder.round(0)
        rounds += 1
        if rounds == interrupt and decoder.live:
            decoder.begin(list(decoder.live)[::-1])
    return {s.sequence_id: s for s in sequences}


def test_an_answer_does_not_depend_on_the_batch(world: Any) -> None:
    """Alone, batched, reordered, or interrupted and prefilled again: the same tokens and log-probs."""
    ids = [0, 4, 7, 11, 12, 30]
    together = answers(world, ids, 6, None)
    assert len({s.length for s in together.values()}) > 3, "lengths should differ"
    for others in (answers(world, ids[::-1], 9, None), answers(world, ids, 6, 5)):
        assert {i: s.response for i, s in others.items()} == {i: s.response for i, s in together.items()}
    for i in ids:
        alone = answers(world, [i], 1, None)[i]
        assert alone.response == together[i].response
        assert alone.behaviour_logprobs == pytest.approx(together[i].behaviour_logprobs, abs=1e-10)
        assert alone.ended_by_eos == (alone.response[-1] == 2) == together[i].ended_by_eos
        assert alone.ended_by_eos or alone.length == 60

"""Top-k, top-p and min-p: kept tokens, recorded supports, and equal distributions in sampling and training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_contract.spec import ModelSpec
from oppo_core.checkpointing.save_restore import restore, save
from oppo_core.models.model_io import load_model
from oppo_core.rollout import sampling
from oppo_core.rollout.decoder import Decoder, DecodeSettings
from oppo_core.rollout.sampling import Filters, sample, sample_filtered, uniforms
from oppo_core.rollout.sampling_support import decode_support, encode_support, load_supports, mask_unsupported, save_supports
from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.deltas import DeltaTracker
from oppo_core.train import train_step
from tests.engine.ppo.oracle import left_by

FILTERS = Filters(top_k=35, top_p=0.97, min_p=0.001)
# Whole numbers, so that ties are frequent and every sum of the plain implementation rounds like the engine's.
LOGITS = st.lists(st.lists(st.integers(-6, 6), min_size=12, max_size=12), min_size=1, max_size=4)
CHOICES = st.builds(
    Filters,
    top_k=st.none() | st.integers(1, 20),
    top_p=st.none() | st.floats(0.01, 0.99),
    min_p=st.none() | st.floats(0.001, 0.99),
)


def plain(filters: Filters, logits: torch.Tensor) -> list[list[int]]:
    """Ids that the oracle keeps of each row."""
    rollout = SimpleNamespace(top_k=filters.top_k, top_p=filters.top_p, min_p=filters.min_p)
    return [sorted(left_by(rollout, row)) for row in logits.tolist()]


def ids(allowed: Any) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in np.asarray(allowed)]


@settings(max_examples=300, deadline=None)
@given(rows=LOGITS, filters=CHOICES, look=st.integers(1, 12))
def test_the_same_tokens_as_a_plain_implementation(rows: list[list[int]], filters: Filters, look: int) -> None:
    logits = torch.tensor(rows, dtype=torch.float64) * 0.7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "TOPK_WIDTHS", (look, look + 3))  # the width changes the cost, not the result
        assert ids(filters.allowed(logits)) == plain(filters, logits)


def test_random_logits_of_a_large_vocabulary() -> None:
    logits = 3 * torch.randn(6, 2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for filters in (Filters(50, None, None), Filters(None, 0.95, None), Filters(None, None, 0.02), Filters(700, 0.9, 1e-4)):
        assert ids(filters.allowed(logits)) == plain(filters, logits)
        for row in range(6):
            assert torch.equal(filters.allowed(logits[row : row + 1])[0], filters.allowed(logits)[row]), "it depends on the batch"


def test_ties_go_to_the_lower_id() -> None:
    flat = torch.zeros(1, 10)
    assert ids(Filters(3, None, None).allowed(flat)) == [[0, 1, 2]]
    assert ids(Filters(None, 0.45, None).allowed(flat)) == [[0, 1, 2, 3, 4]]
    assert ids(Filters(None, None, 0.99).allowed(flat)) == [list(range(10))]
    assert ids(Filters(1, 0.01, 0.99).allowed(torch.tensor([[1.0, 2.0, 2.0]]))) == [[1]]
    assert ids(Filters(100, None, None).allowed(flat)) == [list(range(10))]


def test_frequencies_follow_the_renormalised_softmax() -> None:
    draws, temperature = 100_000, 1.3
    logits = 1.5 * torch.randn(20, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    numbers = torch.from_numpy(np.concatenate([uniforms(5, number, 500) for number in range(draws // 500)]))
    filters = Filters(12, 0.9, 0.01)
    tokens, logp, allowed = sample_filtered(logits.expand(draws, -1), numbers, temperature, filters)
    left = plain(filters, logits[None] / temperature)[0]
    assert 1 < len(left) < 12
    assert set(tokens.tolist()) == set(left) == set(ids(allowed[:1])[0])
    wanted = torch.zeros(20, dtype=torch.float64)
    wanted[left] = torch.softmax(logits[left] / temperature, -1)
    torch.testing.assert_close(logp, wanted.log()[tokens], rtol=0, atol=1e-12)
    observed = torch.bincount(tokens, minlength=20)[left].double()
    statistic = float(((observed - draws * wanted[left]).square() / (draws * wanted[left])).sum())
    freedom, z = len(left) - 1, 3.1
    assert statistic < freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def test_filters_that_leave_everything_change_no_token() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    numbers = torch.from_numpy(uniforms(1, 1, 50))
    tokens, logp = sample(logits, numbers, 0.8)
    among, logp_among, allowed = sample_filtered(logits, numbers, 0.8, Filters(30, None, 1e-9))
    assert bool(allowed.all())
    assert torch.equal(tokens, among)
    assert torch.equal(logp, logp_among)


MASKS = st.integers(1, 300).flatmap(
    lambda vocab: st.lists(
        st.lists(st.integers(0, vocab - 1), min_size=1, max_size=vocab, unique=True), min_size=1, max_size=5
    ).map(lambda rows: (vocab, rows))
)


@settings(max_examples=100, deadline=None)
@given(given_masks=MASKS)
def test_supports_round_trip(tmp_path_factory: pytest.TempPathFactory, given_masks: Any) -> None:
    vocab, rows = given_masks
    allowed = torch.zeros(len(rows), vocab, dtype=torch.bool)
    for row, left in enumerate(rows):
        allowed[row, left] = True
    support = encode_support(allowed)
    assert np.array_equal(decode_support(support, vocab), allowed.numpy())
    assert all(left.nbytes <= (vocab + 7) // 8 for left in support)
    folder = tmp_path_factory.mktemp("support")
    sequences = [Sequence(7, 0, np.asarray([3]), response=[1] * len(rows), support=support), Sequence(8, 0, np.asarray([3]))]
    save_supports(sequences, folder)
    read = [replace(sequence, support=[]) for sequence in sequences]
    load_supports(read, [folder])
    assert np.array_equal(decode_support(read[0].support, vocab), allowed.numpy())
    assert read[1].support == []


def test_tokens_outside_the_support_have_no_probability_and_no_gradient() -> None:
    logits = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    support = encode_support(torch.tensor([[1, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]], dtype=torch.bool))
    logp = torch.log_softmax(mask_unsupported(logits, support), -1)
    assert logp.exp().detach()[1].tolist() == [0, 0, 0, 1, 0, 0]
    entropy = -(logp.exp() * logp).sum()
    (gradient,) = torch.autograd.grad(entropy + logp[0, 0], logits)
    assert bool(gradient.isfinite().all())
    assert gradient[1].tolist() == [0.0] * 6
    assert gradient[0, [1, 3, 4, 5]].tolist() == [0.0] * 4
    assert mask_unsupported(logits, []) is logits


def decoded(world: Any, numbers: list[int], slots: int, interrupt: int | None = None) -> dict[int, Sequence]:
    actor = load_model(ModelSpec(path="actor"), "lm", [world.folder], torch.float64, 0)
    decoder = Decoder(actor, DecodeSettings(3, 2, 0.9, 12, 60, 400, filters=FILTERS), slots)
    sequences = [Sequence(i, 0, np.asarray([3 + i % 30] * (1 + i % 12))) for i in numbers]
    decoder.begin(sequences)
    while decoder.live:
        decoder.round(0)
        if decoder.rounds == interrupt and decoder.live:
            decoder.begin(list(decoder.live)[::-1])
    return {s.sequence_id: s for s in sequences}


def test_a_filtered_answer_does_not_depend_on_the_batch(world: Any) -> None:
    together = decoded(world, [0, 4, 7, 11, 12, 30], 6)
    for others in (decoded(world, [30, 12, 11, 7, 4, 0], 9), decoded(world, [0, 4, 7, 11, 12, 30], 6, interrupt=5)):
        for number, sequence in together.items():
            assert others[number].response == sequence.response
            assert ids(decode_support(others[number].support, 40)) == ids(decode_support(sequence.support, 40))
    assert all(len(s.support) == s.length for s in together.values())


@pytest.mark.parametrize("overlap", [{"intra_step": "off"}, {"intra_step": "per_chunk"}])
def test_at_unchanged_weights_proximal_and_reference_are_behaviour(world: Any, tmp_path: Path, overlap: Any) -> None:
    """Step 1: actor, reference and sampler have the same weights, so their masked distributions must be the same too."""
    rollout = {"top_k": 35, "top_p": 0.9, "min_p": 0.001}
    run = world.run(world.spec({"steps": 1, "rollout": rollout, "overlap": overlap}), tmp_path, inline=True)
    e = run.steps[0].experience
    assert max(len(row) for s in e.sequences for row in ids(decode_support(s.support, 40))) < 35
    for other in (e.proximal_logp, e.reference_logp):
        torch.testing.assert_close(other[e.mask], e.behaviour_logp[e.mask], rtol=0, atol=1e-10)
    assert run.steps[0].metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-10)
    assert 0 < run.steps[0].metrics["actor/entropy"] < math.log(35)


def test_a_checkpoint_carries_the_supports_of_answers_in_flight(world: Any, tmp_path: Path) -> None:
    spec = world.spec({"rollout": {"top_k": 35, "top_p": 0.97, "min_p": 0.001}, "overlap": {"intra_step": "off"}})
    engine, other = world.assemble(spec, tmp_path / "a"), world.assemble(spec, tmp_path / "b")
    train_step(engine, 0.0)
    save(engine)
    restore(other, next((tmp_path / "a" / "checkpoints").glob("step-*")))
    assert any(s.length for s in engine.pool.sequences), "nothing is in flight"
    for one, two in zip(engine.pool.sequences, other.pool.sequences, strict=True):
        assert ids(decode_support(one.support, 40)) == ids(decode_support(two.support, 40))
    with world.recorded() as steps:
        train_step(engine, 0.0)
        train_step(other, 0.0)
    assert steps[0].tokens == steps[1].tokens
    assert torch.equal(steps[0].experience.proximal_logp, steps[1].experience.proximal_logp)


@settings(max_examples=50, deadline=None)
@given(prompt=st.integers(1, 5), cuts=st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_each_support_is_sent_once_with_its_token(prompt: int, cuts: list[int]) -> None:
    sequence, handover = Sequence(4, 0, np.arange(prompt)), DeltaTracker()
    told: list[Any] = []
    for cut in cuts:
        for _ in range(cut):
            sequence.response.append(100 + sequence.length)
            sequence.support.append(np.asarray([sequence.length], dtype=np.int32))
        for delta in handover.new_deltas([sequence]):
            told += delta.support
    assert [int(left[0]) for left in told] == list(range(1, sequence.length + 1))

"""Chunked prefill of growing sequences equals one forward pass over each whole sequence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn import functional

from oppo_contract.spec import ModelSpec
from oppo_core.models.banded_attention import fused
from oppo_core.models.cache import SlotCache
from oppo_core.models.graphed_reads import GraphedReads
from oppo_core.models.huggingface import additive
from oppo_core.models.incremental_prefill import IncrementalPrefill
from oppo_core.models.model_io import load_model
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network
from oppo_core.ppo import logprobs as logprobs_module
from oppo_core.ppo.critic import CriticTrainer
from oppo_core.ppo.scored import Scored
from oppo_core.rewards.composite import Part, Rewards
from oppo_core.scoring import scorers as scorers_module
from oppo_core.scoring.scorers import Networks, ScorerSet, SequenceDelta
from oppo_core.trace.recorder import Recorder

COLUMNS = 32
SLOTS = 5
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(slots=True)
class Growing:
    """A sequence, its prompt length, and the tokens sent per round. It joins in round `joins`."""

    tokens: NDArray[np.int64]
    prompt: int
    joins: int
    parts: list[int]


@st.composite
def growing(draw: st.DrawFn) -> Growing:
    """Any length up to the last column, often exactly full; parts of any size, zero included, but the last, which ends it."""
    length = draw(st.one_of(st.integers(2, COLUMNS), st.just(COLUMNS)))
    prompt = draw(st.integers(1, length - 1))
    cuts = sorted(draw(st.lists(st.integers(prompt, length - 1), max_size=5)))
    edges = [0, *cuts, length]
    tokens = np.asarray(draw(st.lists(st.integers(3, 39), min_size=length, max_size=length)), dtype=np.int64)
    return Growing(tokens, prompt, draw(st.integers(0, 3)), [b - a for a, b in pairwise(edges)])


def rounds_of(sequences: list[Growing]) -> list[list[tuple[int, int, bool]]]:
    """For each round: (sequence, tokens sent so far, whether finished)."""
    told = [0] * len(sequences)
    rounds = []
    for number in range(max(s.joins + len(s.parts) for s in sequences)):
        news = []
        for index, sequence in enumerate(sequences):
            part = number - sequence.joins
            if 0 <= part < len(sequence.parts):
                told[index] += sequence.parts[part]
                news.append((index, told[index], part == len(sequence.parts) - 1))
        rounds.append(news)
    return rounds


def network(world: Any, head: str, dtype: torch.dtype) -> Network:
    """The world's actor or reward model."""
    return load_model(ModelSpec(path="actor" if head == "lm" else "reward"), head, [world.folder], dtype, 0)


@torch.no_grad()
def plain(model: Network, tokens: NDArray[np.int64]) -> torch.Tensor:
    """Hidden states [T, H] of one sequence by itself."""
    return model.hidden(torch.from_numpy(tokens)[None], torch.arange(len(tokens))[None])[0]


def as_on_a_gpu(stream: IncrementalPrefill) -> None:
    """Chunks are read in few shapes, with a slot more for padding rows, but not as CUDA graphs."""
    weight = next(stream.network.parameters())
    stream._cache = SlotCache(stream.network.cache_shape, SLOTS + 1, COLUMNS + 1, weight)
    stream._graphed = GraphedReads(stream.network, stream._cache, weight.device)


@pytest.mark.parametrize("in_few_shapes", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@QUICK
@given(sequences=st.lists(growing(), min_size=1, max_size=SLOTS), budget=st.sampled_from([16, 60, 1000]))
def test_ragged_chunks_equal_one_shot(
    world: Any, dtype: torch.dtype, in_few_shapes: bool, sequences: list[Growing], budget: int
) -> None:
    model = network(world, "lm", dtype)
    stream = IncrementalPrefill(model, SLOTS, COLUMNS, PassBudget(budget))
    if in_few_shapes:
        as_on_a_gpu(stream)
    states: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(sequences))}
    for news in rounds_of(sequences):
        tokens = {index: sequences[index].tokens[:told] for index, told, _ in news}
        readings = stream.read(tokens, {index for index, _, done in news if done})
        for index, reading in readings.items():
            overlap = sum(len(part) for part in states[index]) - reading.first
            assert overlap in (0, 1)
            if overlap:
                assert torch.equal(reading.hidden[0], states[index][-1][-1])
            states[index].append(reading.hidden[overlap:])
    for index, sequence in enumerate(sequences):
        read = torch.cat(states[index])
        torch.testing.assert_close(read, plain(model, sequence.tokens), rtol=0, atol=TOLERANCE[dtype])
    assert sorted(stream._free) == list(range(SLOTS)), "a finished sequence kept its slot"


def scorer_set(world: Any, dtype: torch.dtype, budget: int) -> ScorerSet:
    """Reference, critic and reward model with different weights."""
    ppo = world.spec().ppo
    critic = network(world, "scalar", dtype)
    with torch.no_grad():
        for weight in critic.parameters():
            weight.mul_(0.9)
    networks = Networks(network(world, "lm", dtype), critic, Rewards([Part(1.0, network(world, "scalar", dtype))]))
    return ScorerSet(networks, CriticTrainer(critic, ppo, 0, 1), SLOTS, COLUMNS, budget, 0.8, Recorder(("cpu:0",)))


@torch.no_grad()
def plain_scores(scorers: ScorerSet, sequence: Growing) -> Scored:
    """Score, reference log-probs and values from one forward pass per network."""
    reward = scorers.reward.streams[0].network
    first = sequence.prompt - 1
    logits = scorers.reference.network.logits(plain(scorers.reference.network, sequence.tokens)[first:-1]) / 0.8
    told = torch.from_numpy(sequence.tokens[sequence.prompt :])[:, None]
    logp = torch.log_softmax(logits, -1).gather(-1, told)[:, 0]
    values = scorers.critic.network.scalar(plain(scorers.critic.network, sequence.tokens)[first:-1])
    score = reward.scalar(plain(reward, sequence.tokens)[-1])
    return Scored(float(score), logp.double().numpy(), values.double().numpy())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@QUICK
@given(
    sequences=st.lists(growing(), min_size=1, max_size=SLOTS),
    budget=st.sampled_from([16, 60, 1000]),
    begins=st.sets(st.integers(0, 9)),
    saves=st.sets(st.integers(0, 9), max_size=2),
)
def test_scores_equal_the_plain_forward(
    world: Any, tmp_path: Any, dtype: torch.dtype, sequences: list[Growing], budget: int, begins: set[int], saves: set[int]
) -> None:
    """For any chunks, step starts (which reset the critic's cache) and checkpoints."""
    slices = mock.patch.object(logprobs_module, "HEAD_SLICE", 1 + budget % 7)
    with slices, mock.patch.object(scorers_module, "HEAD_STATES", 1 + budget % 13):
        check_scores(scorer_set(world, dtype, budget), tmp_path, dtype, sequences, begins, saves)


def check_scores(
    scorers: ScorerSet, tmp_path: Any, dtype: torch.dtype, sequences: list[Growing], begins: set[int], saves: set[int]
) -> None:
    told = [0] * len(sequences)
    finished: set[int] = set()
    for number, news in enumerate(rounds_of(sequences)):
        if number in saves:
            scorers.start_save(str(tmp_path))
            news = [
                (i, told[i], i in finished) for i in range(len(sequences)) if told[i] and i not in {n[0] for n in news}
            ] + news
            told = [0] * len(sequences)
        deltas = [
            SequenceDelta(i, sequences[i].prompt, sequences[i].tokens[told[i] : until], done) for i, until, done in sorted(news)
        ]
        scorers.begin(deltas) if number in begins | saves else scorers.extend(deltas, number)
        for index, until, done in news:
            told[index] = until
            finished |= {index} if done else set()
    scorers.start_collect(list(range(len(sequences))))
    scored = scorers.wait_collect()
    assert isinstance(scored, dict)
    for index, sequence in enumerate(sequences):
        wanted, atol = plain_scores(scorers, sequence), TOLERANCE[dtype]
        assert scored[index].score == pytest.approx(wanted.score, abs=atol)
        np.testing.assert_allclose(scored[index].reference_logprobs, wanted.reference_logprobs, rtol=0, atol=atol)
        np.testing.assert_allclose(scored[index].values, wanted.values, rtol=0, atol=atol)


def test_attention_accepts_results_of_any_strides() -> None:
    """A GPU's kernels return rows, tokens, heads and widths in this order, in memory."""
    query, keys, values = torch.randn(2, 6, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    expected, kernel = fused(query, keys, values, mask), functional.scaled_dot_product_attention

    def as_on_a_gpu(*given: Any, **named: Any) -> torch.Tensor:
        return kernel(*given, **named).transpose(1, 2).contiguous().transpose(1, 2)

    with mock.patch.object(functional, "scaled_dot_product_attention", as_on_a_gpu):
        assert torch.equal(fused(query, keys, values, mask), expected)


def test_a_pass_of_few_shapes_stays_within_the_budget(world: Any) -> None:
    """Two rows of one new token are padded to a pass of 5 × 16: only where the budget allows as much."""
    model, read = network(world, "lm", torch.float64), []
    for budget in (79, 80):
        stream = IncrementalPrefill(model, SLOTS, COLUMNS, PassBudget(budget))
        as_on_a_gpu(stream)
        assert stream._graphed is not None
        with mock.patch.object(stream._graphed, "read", wraps=stream._graphed.read) as graphed:
            for length in (4, 5):
                stream.read({row: np.arange(3, 3 + length) for row in (0, 1)}, set())
        read.append(graphed.call_count)
    assert read == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additive_masks_give_what_boolean_ones_give(dtype: torch.dtype) -> None:
    """Also where four queries share keys and a chunk has several tokens; a row that sees nothing stays finite."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(3, 8, 5, 16, generator=draw).to(dtype)
    keys, values = torch.randn(2, 3, 2, 9, 16, generator=draw).to(dtype)
    mask = torch.arange(9) <= torch.tensor([4, 2, 0])[:, None, None, None] + torch.arange(5)[:, None]
    torch.testing.assert_close(fused(query, keys, values, additive(mask, dtype)), fused(query, keys, values, mask))
    assert fused(query, keys, values, additive(mask & False, dtype)).isfinite().all()

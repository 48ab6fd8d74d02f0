"""Every supported architecture, written as a folder and read by the engine's own loader, against plain transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oppo_contract.spec import ModelSpec, Ppo
from oppo_core.models.huggingface import HuggingFaceNetwork
from oppo_core.models.model_io import load_model, restore_weights, save_actor
from oppo_core.ppo.critic import CriticTrainer
from oppo_core.rewards.composite import Part, Rewards
from oppo_core.rollout.decoder import Decoder, DecodeSettings
from oppo_core.rollout.sampling import Filters
from oppo_core.rollout.sampling_support import mask_unsupported
from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.scorers import Networks, ScorerSet, SequenceDelta
from oppo_core.trace.recorder import Recorder
from tests.engine.models.architectures import (
    ARCHITECTURES,
    CONTEXT,
    VOCAB,
    WINDOW,
    WITHOUT_BANDS,
    WITHOUT_CLASSIFIER,
    Tokens,
    plain_actor,
    plain_backbone,
    plain_reward,
    write_folders,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
TEMPERATURE = 0.8
# Prompt length and where each chunk ends; a repeated end is a chunk without tokens, a single end an answer told at once.
SCHEDULES = [(3, [4, 4, 11, 12, 30]), (1, [2, 9, 9, 9, 23]), (7, [8, 40]), (5, [25])]
Folders = Callable[[str], Path]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of an architecture, written at first use."""
    written: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in written:
            written[name] = write_folders(name, tmp_path_factory.mktemp(name))
        return written[name]

    return folder


def load(folder: Path, part: str, head: Any, dtype: torch.dtype) -> HuggingFaceNetwork:
    network = load_model(ModelSpec(path=part), head, [folder], dtype, 0)
    assert isinstance(network, HuggingFaceNetwork)
    return network


def some_tokens() -> list[Tokens]:
    generator = np.random.default_rng(5)
    return [generator.integers(3, VOCAB, ends[-1]) for _, ends in SCHEDULES]


def streamed(folder: Path, name: str, rows: list[Tokens], dtype: torch.dtype) -> tuple[ScorerSet, dict[int, Any]]:
    """Reward, reference and critic read the rows in the chunks of SCHEDULES."""
    critic = load(folder, "actor", "scalar", dtype)
    assert critic.own_head is not None
    with torch.no_grad():
        critic.own_head.weight.copy_(torch.linspace(-1, 1, critic.width)[None])
    classifies = name not in WITHOUT_CLASSIFIER
    rewards = Rewards([Part(1.0, load(folder, "reward", "scalar", dtype))] if classifies else [])
    networks = Networks(load(folder, "actor", "lm", dtype), critic, rewards)
    trainer = CriticTrainer(critic, Ppo(batch_size=4), 0, 1)
    scorers = ScorerSet(networks, trainer, len(rows), CONTEXT, 60, TEMPERATURE, Recorder(("cpu:0",)))
    for turn in range(max(len(ends) for _, ends in SCHEDULES)):
        deltas = []
        for number, (prompt, ends) in enumerate(SCHEDULES):
            if turn < len(ends):
                first = ends[turn - 1] if turn else 0
                deltas.append(SequenceDelta(number, prompt, rows[number][first : ends[turn]], turn == len(ends) - 1))
        scorers.extend(deltas, turn)
    scorers.start_collect(list(range(len(rows))))
    return scorers, scorers.wait_collect()  # type: ignore[return-value]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_reads_the_cache_band_by_band(folders: Folders, name: str) -> None:
    """Wherever the model leaves its attention to us: it costs half of what copying the cache for all rows does."""
    assert load(folders(name), "actor", "lm", torch.float32).attends_by_band == (name not in WITHOUT_BANDS)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_streamed_scores_equal_one_padded_pass(folders: Folders, name: str, dtype: torch.dtype) -> None:
    folder, rows, atol = folders(name), some_tokens(), TOLERANCE[dtype]
    assert max(len(row) for row in rows) > 3 * WINDOW, "rows must reach beyond the window"
    scorers, scored = streamed(folder, name, rows, dtype)
    actor, backbone = plain_actor(folder, dtype), plain_backbone(folder, dtype)
    for left in (True, False):
        logits, states = actor(rows, left, "logits"), backbone(rows, left, "last_hidden_state")
        for number, (row, (prompt, _)) in enumerate(zip(rows, SCHEDULES, strict=True)):
            told = torch.from_numpy(row[prompt:])[:, None]
            logp = torch.log_softmax(logits[number][prompt - 1 : -1] / TEMPERATURE, -1).gather(-1, told)[:, 0]
            values = scorers.critic.network.scalar(states[number][prompt - 1 : -1]).detach()
            np.testing.assert_allclose(scored[number].reference_logprobs, logp.double().numpy(), rtol=0, atol=atol)
            np.testing.assert_allclose(scored[number].values, values.double().numpy(), rtol=0, atol=atol)
    if name not in WITHOUT_CLASSIFIER:
        classifier = plain_reward(folder, dtype)
        for number, row in enumerate(rows):
            assert scored[number].score == pytest.approx(classifier.score(row), abs=atol)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("kept", [False, True], ids=["plain", "filtered, kept, in bands"])
def test_decoding_gives_the_log_probs_of_one_pass(
    folders: Folders, name: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uneven prompts, rows that leave, one that joins half-finished, all beyond the window; with filters, kept caches, bands."""
    monkeypatch.setattr("oppo_core.rollout.decoder.BAND_COST_CELLS", 1 if kept else 10**9)
    folder = folders(name)
    actor = load(folder, "actor", "lm", torch.float64)
    settings = DecodeSettings(
        seed=3, eos=2, temperature=TEMPERATURE, max_prompt=9, max_new=3 * WINDOW, micro_batch_tokens=40,
        filters=Filters(None, 0.9, None) if kept else None, keeps_cache=kept,
    )  # fmt: skip
    decoder = Decoder(actor, settings, 3)
    prompts = [row[:length] for row, length in zip(some_tokens(), (9, 2, 5), strict=False)]
    sequences = [Sequence(number, number, prompt) for number, prompt in enumerate(prompts)]
    decoder.begin(sequences[:2])
    for _ in range(4):
        decoder.round(version=0)
    decoder.begin([s for s in sequences if not s.finished])
    while decoder.live:
        decoder.round(version=1)
    rows = [sequence.tokens() for sequence in sequences]
    for row, logits, sequence in zip(rows, plain_actor(folder, torch.float64)(rows, True, "logits"), sequences, strict=True):
        first = len(sequence.prompt)
        told = torch.from_numpy(row[first:])[:, None]
        among = mask_unsupported(logits[first - 1 : -1] / TEMPERATURE, sequence.support)
        logp = torch.log_softmax(among, -1).gather(-1, told)[:, 0]
        np.testing.assert_allclose(sequence.behaviour_logprobs, logp.numpy(), rtol=0, atol=1e-10)
    assert max(len(row) for row in rows) > 2 * WINDOW


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_train_and_come_back(folders: Folders, tmp_path: Path, name: str) -> None:
    """The actor through a plain folder, the critic, started from the actor or the reward model, through its checkpoint."""
    folder, row = folders(name), torch.from_numpy(some_tokens()[0])[None]
    places = torch.arange(row.shape[1])[None]
    actor = load(folder, "actor", "lm", torch.float64)
    torch.log_softmax(actor.logits(actor.hidden(row, places)), -1)[..., 3].sum().backward()
    step_along_the_gradient(actor)
    save_actor(actor, tmp_path / "actor", folder / "actor", 2, 0)
    again = load(folder, "actor", "lm", torch.float64)
    restore_weights(again, tmp_path / "actor")
    plain = plain_actor(tmp_path, torch.float64)([some_tokens()[0]], False, "logits")[0]
    with torch.no_grad():
        assert torch.equal(again.logits(again.hidden(row, places)), actor.logits(actor.hidden(row, places)))
        torch.testing.assert_close(actor.logits(actor.hidden(row, places))[0], plain, rtol=0, atol=1e-10)
    for start in ("actor", "reward")[: 1 if name in WITHOUT_CLASSIFIER else 2]:
        critic, copy = (load(folder, start, "scalar", torch.float64) for _ in range(2))
        critic.scalar(critic.hidden(row, places)).sum().backward()
        step_along_the_gradient(critic)
        CriticTrainer(critic, Ppo(batch_size=4), 0, 1).save(str(tmp_path))
        CriticTrainer(copy, Ppo(batch_size=4), 0, 1).load(tmp_path)
        with torch.no_grad():
            assert torch.equal(copy.hidden(row, places), critic.hidden(row, places))
            assert torch.equal(copy.scalar(copy.hidden(row, places)), critic.scalar(critic.hidden(row, places)))


@torch.no_grad()
def step_along_the_gradient(network: HuggingFaceNetwork) -> None:
    """Every weight that has a gradient moves, and there are many that have one."""
    moved = [weight for weight in network.parameters() if weight.grad is not None and weight.grad.any()]
    assert moved
    for weight in moved:
        assert weight.grad is not None
        weight.add_(weight.grad.sign() * 1e-3)

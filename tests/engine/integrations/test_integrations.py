"""Rollouts for a trainer that is not ours, and what of the adapter for TRL needs no TRL; the rest: tests/backends/test_trl.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from oppo_contract.spec import TinyArchitecture
from oppo_core.integrations import trl_compat
from oppo_core.integrations.rollouts import Overlap, Rollout, Rollouts
from oppo_core.integrations.trl import Batch, dataset_prompts, judged_tokens
from oppo_core.integrations.trl_compat import OverlapError, check_amounts, check_trainer
from oppo_core.models import decode_weights
from oppo_core.models.microbatching import response_states
from oppo_core.models.protocol import Network
from oppo_core.models.tiny_transformer import init_tiny
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.sequence import Sequence

PAD, EOS, VOCAB = 0, 1, 12
SETTINGS = DecodeSettings(
    seed=3, eos=EOS, temperature=0.9, max_prompt=5, max_new=24, micro_batch_tokens=200, scores_stale_tokens=True
)  # fmt: skip
SHAPE = TinyArchitecture(vocab=VOCAB, context=64, hidden=16, layers=1, heads=2)


def prompts() -> Iterator[NDArray[np.int64]]:
    numbers = np.random.default_rng(0)
    while True:
        yield numbers.integers(2, VOCAB, numbers.integers(1, 6))


@pytest.fixture
def rolled() -> Iterator[Callable[..., tuple[Rollouts, Network, Network]]]:
    opened = []

    def make(overcommit: int, **more: Any) -> tuple[Rollouts, Network, Network]:
        policy, reward = init_tiny(SHAPE, "lm", 0).double(), init_tiny(SHAPE, "scalar", 1).double()
        torch.nn.init.normal_(reward.head.weight, generator=torch.Generator().manual_seed(4))
        amounts = Overlap(batch=4, overcommit=overcommit, chunk=3, max_age=2)
        opened.append(Rollouts(policy, reward, prompts(), amounts, SETTINGS, **more))
        return opened[-1], policy, reward

    yield make
    for rollouts in opened:
        rollouts.close()


@torch.no_grad()
def check(rollout: Rollout, policy: Network, reward: Network, visible: Callable[[Sequence], NDArray[np.int64]]) -> None:
    """Every score is that of one pass, every log-prob that of the present weights."""
    for sequence, score in zip(rollout.sequences, rollout.scores, strict=True):
        read = torch.from_numpy(visible(sequence))[None]
        positions = torch.arange(read.shape[1])[None]
        assert score == pytest.approx(float(reward.scalar(reward.hidden(read, positions)[0, -1])), abs=1e-9)
        logits = policy.logits(response_states(policy, [sequence.tokens()], [len(sequence.prompt)])) / SETTINGS.temperature
        expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(sequence.response)[:, None])[:, 0]
        np.testing.assert_allclose(sequence.proximal(), expected.numpy(), atol=1e-9)


@pytest.mark.parametrize("overcommit", [0, 3])
def test_every_prompt_is_answered_once_under_the_present_weights(rolled: Any, overcommit: int) -> None:
    rollouts, policy, reward = rolled(overcommit)
    trained: list[Sequence] = []
    for _ in range(6):
        rollout = rollouts.next()
        check(rollout, policy, reward, Sequence.tokens)
        trained += rollout.sequences
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.05)  # a step of training
    ids = sorted(s.sequence_id for s in trained + rollouts.unconsumed)
    assert ids == list(range(24 + overcommit))
    source = prompts()
    drawn = [next(source).tolist() for _ in ids]
    assert all(s.prompt.tolist() == drawn[s.sequence_id] for s in trained)
    assert rollouts.deferred == sum(s.age > 0 for s in trained)
    assert (rollouts.deferred > 0) == (overcommit > 0)
    if overcommit:
        assert any(len(set(s.token_versions)) > 1 for s in trained), "some answer was gone on with"
        assert any(s.age and len(set(s.token_versions)) == 1 for s in trained), "some answer was surplus"
    else:
        assert [s.sequence_id for s in trained] == ids


@pytest.mark.parametrize("pad", [PAD, EOS], ids=["pad", "pad-is-eos"])
def test_the_reward_is_shown_what_is_before_the_first_pad_token(rolled: Any, pad: int) -> None:
    def visible(sequence: Sequence) -> NDArray[np.int64]:
        return judged_tokens(sequence, pad)

    rollouts, policy, reward = rolled(2, visible=visible)
    told = [rollouts.next() for _ in range(4)]
    for rollout in told:
        check(rollout, policy, reward, visible)
        batch = Batch.from_rollout(rollout, pad, torch.device("cpu"))
        rows = torch.cat([batch.queries, batch.responses], 1)
        assert batch.lookup_scores(rows, pad, batch.queries.shape[1]) == rollout.scores
        assert batch.lookup_scores(rows[:, 1:] + 1, pad, batch.queries.shape[1]) is None
    answers = [s.response for rollout in told for s in rollout.sequences]
    assert any(pad in answer for answer in answers)


def test_exception_of_the_reward_thread_ends_the_step(rolled: Any) -> None:
    rollouts, _, reward = rolled(0)
    reward.hidden = lambda *_: [][0]
    with pytest.raises(IndexError):
        rollouts.next()


def test_prompts_come_without_padding_and_fit() -> None:
    batches = [{"input_ids": torch.tensor([[PAD, 5, 6], [7, 8, 9]])}]
    source = dataset_prompts(batches, PAD)
    assert [next(source).tolist() for _ in range(3)] == [[5, 6], [7, 8, 9], [5, 6]]
    with pytest.raises(ValueError, match="fewer prompts than a batch"):
        next(dataset_prompts([], PAD))


def test_a_prompt_that_is_too_long_is_named() -> None:
    policy, reward = init_tiny(SHAPE, "lm", 0), init_tiny(SHAPE, "scalar", 1)
    rollouts = Rollouts(policy, reward, iter([np.arange(6)]), Overlap(1, 0, 3, 1), SETTINGS)
    with pytest.raises(ValueError, match="prompt 1 has 6 tokens; there is room for 1 to 5"):
        rollouts.next()
    rollouts.close()


def test_after_an_error_the_policy_uses_its_weights_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_weights, "LEAST_DECODE_COPY", 0)
    policy, reward = init_tiny(SHAPE, "lm", 0), init_tiny(SHAPE, "scalar", 1)
    used = []

    def visible(sequence: Sequence) -> NDArray[np.int64]:
        used.append("logits" in policy.__dict__)
        raise OSError("the tokenizer's file is gone")

    rollouts = Rollouts(policy, reward, iter([np.arange(3)]), Overlap(1, 0, 3, 1), SETTINGS, visible)
    with pytest.raises(OSError, match="gone"):
        rollouts.next()
    rollouts.close()
    assert used == [True]
    assert "logits" not in policy.__dict__


FUNCTIONS: dict[str, Any] = {}
exec(  # in a namespace of its own, as that of TRL's module is
    """
def batch_generation(model, queries, local_rollout_forward_batch_size, pad_token_id, generation_config): ...
def selective_log_softmax(logits, index): ...
def get_reward(model, query_responses, pad_token_id, context_length): ...
class PPOTrainer:
    def train(self): batch_generation(); selective_log_softmax(); get_reward()
""",
    FUNCTIONS,
)


def trainer(**changes: Any) -> Any:
    """As much of a trainer as is looked at."""
    made = FUNCTIONS["PPOTrainer"]()
    config = SimpleNamespace(_attn_implementation="sdpa", name_or_path="it")
    policy = SimpleNamespace(config=config, generation_config=SimpleNamespace(min_p=None, repetition_penalty=1.0))
    reward = SimpleNamespace(config=config, parameters=list)
    told: dict[str, Any] = {
        "args": SimpleNamespace(local_batch_size=8), "accelerator": SimpleNamespace(num_processes=1),
        "processing_class": SimpleNamespace(pad_token_id=0), "policy_model": policy, "reward_model": reward,
        "model": SimpleNamespace(parameters=list),
        "is_deepspeed_enabled": False, "is_fsdp_enabled": False, "is_peft_model": False,
    }  # fmt: skip
    vars(made).update(told | changes)
    return made


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_compat, "_version", lambda: "1.12.0")
    monkeypatch.setattr(trl_compat.supported, "refuse_unsupported", lambda *_: None)


WEIGHT = torch.nn.Parameter(torch.zeros(1))
SHARED = SimpleNamespace(config=SimpleNamespace(_attn_implementation="eager"), parameters=lambda: [WEIGHT])
FLASH = SimpleNamespace(config=SimpleNamespace(_attn_implementation="flash_attention_2"), parameters=list)
BENT = SimpleNamespace(config=SHARED.config, generation_config=SimpleNamespace(repetition_penalty=1.1))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"accelerator": SimpleNamespace(num_processes=2)}, "it trains in 2 processes"),
        ({"is_deepspeed_enabled": True}, "DeepSpeed"),
        ({"is_fsdp_enabled": True}, "FSDP"),
        ({"is_peft_model": True}, "PEFT adapters"),
        ({"processing_class": SimpleNamespace(pad_token_id=None)}, "no pad token"),
        ({"model": SHARED, "reward_model": SHARED}, "shares weights with a trained model"),
        ({"reward_model": FLASH}, "attention of kind flash_attention_2"),
        ({"policy_model": BENT}, "repetition_penalty 1.1"),
    ],
)
def test_unsupported_trainer_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    assert check_trainer(trainer()) is FUNCTIONS
    with pytest.raises(OverlapError, match=said):
        check_trainer(trainer(**changes))


@pytest.mark.usefixtures("installed")
def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OverlapError, match=r"SimpleNamespace\.train is not that of"):
        check_trainer(SimpleNamespace())
    monkeypatch.setitem(FUNCTIONS, "selective_log_softmax", lambda logits, index, mask: None)
    with pytest.raises(OverlapError, match="takes logits, index, mask; the overlap supports logits, index"):
        check_trainer(trainer())
    monkeypatch.setitem(FUNCTIONS, "selective_log_softmax", Rollouts.next.__get__(object()))
    with pytest.raises(OverlapError, match="already overlapped"):
        check_trainer(trainer())
    monkeypatch.setattr(trl_compat, "_version", lambda: "1.120.0")
    with pytest.raises(OverlapError, match=r"trl 1\.120\.0 is installed"):
        check_trainer(trainer())


@pytest.mark.parametrize(("amounts", "said"), [((9, 1, 1), "0 to the batch's 8"), ((0, 0, 1), "chunk"), ((0, 1, 0), "max_age")])
def test_amounts_have_limits(amounts: tuple[int, int, int], said: str) -> None:
    check_amounts(trainer(), 8, 1, 1)
    with pytest.raises(OverlapError, match=said):
        check_amounts(trainer(), *amounts)

"""TRL's PPOTrainer with and without our overlap, in an environment that has TRL: `make test-trl`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed here; `make test-trl` makes an environment that has it")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from oppo_core.integrations.trl import LogProbs, overlap
from oppo_core.integrations.trl_compat import FUNCTIONS, OverlapError

WORDS = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(13))]
PAD, EOS, BATCH, LONGEST = 0, 2, 4, 20
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS, "initializer_range": 0.2,
}  # fmt: skip
PROMPTS = [[3 + a, 3 + b, *([3 + (a + b) % 13] * (a % 3))] for a in range(8) for b in range(5)]  # 40, all different


def trainer_of(folder: Path, pad: str = "<pad>", **changes: Any) -> Any:
    """A trainer of small networks with the same weights every time."""
    tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token=pad, eos_token="<eos>", padding_side="left")
    torch.manual_seed(1)
    policy, reference = (LlamaForCausalLM(LlamaConfig(**SIZES)) for _ in range(2))
    reward, value = (LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)) for _ in range(2))
    given: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "num_sample_generations": 0, "seed": 5, "learning_rate": 1e-3, "temperature": 0.8, "stop_token": "eos",
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_mini_batches": 1, "num_ppo_epochs": 2,
        "local_rollout_forward_batch_size": 2, "response_length": LONGEST, "total_episodes": 4 * BATCH,
    }  # fmt: skip
    data = Dataset.from_list([{"input_ids": prompt} for prompt in PROMPTS])
    return PPOTrainer(
        PPOConfig(**given | changes), tokenizer, model=policy, ref_model=reference, reward_model=reward.eval(), value_model=value,
        train_dataset=data, eval_dataset=data.select(range(8)),
    )  # fmt: skip


def trained(trainer: Any) -> None:
    """TRL shuffles micro-batches by numpy's global numbers."""
    np.random.seed(7)
    trainer.train()


@torch.no_grad()
def logits_of(policy: Any, rows: torch.Tensor, context: int, pad: int, temperature: float) -> torch.Tensor:
    """What TRL itself takes the log-probs of: one pass over whole rows."""
    told: torch.Tensor = ppo_trainer.forward(policy, rows, pad).logits[:, context - 1 : -1]
    return told / (temperature + 1e-7)


class Witness:
    """Stands before the functions that stand in for TRL's, notes what they give, and compares it with what TRL's own give."""

    def __init__(self, trainer: Any, own: dict[str, Any]) -> None:
        self.trainer, self.own, self.pad = trainer, own, trainer.processing_class.pad_token_id
        self.inner = {name: getattr(ppo_trainer, name) for name in FUNCTIONS}
        self.rollouts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.scores = self.passed_on = 0

    def batch_generation(self, model: Any, queries: torch.Tensor, *more: Any) -> Any:
        rows, rated = self.inner["batch_generation"](model, queries, *more)
        if not isinstance(rated, LogProbs):
            self.passed_on += 1
            return rows, rated
        logits = logits_of(model, rows, queries.shape[1], self.pad, self.trainer.args.temperature)
        answers = rows[:, queries.shape[1] :]
        own = self.own["selective_log_softmax"](logits, answers)
        shown = (answers == self.pad).cumsum(1) == 0
        torch.testing.assert_close(rated.logprobs[shown], own[shown], rtol=0, atol=2e-5)
        self.rollouts.append((queries, rows))
        return rows, rated

    def get_reward(self, model: Any, rows: torch.Tensor, *more: Any) -> Any:
        told = self.inner["get_reward"](model, rows, *more)
        if told[0] is None:
            own = self.own["get_reward"](model, rows, *more)[1]
            torch.testing.assert_close(told[1], own, rtol=0, atol=2e-5)
            self.scores += len(own)
        return told


@contextmanager
def witnessed(trainer: Any, **amounts: Any) -> Iterator[tuple[Any, Witness]]:
    own = {name: getattr(ppo_trainer, name) for name in FUNCTIONS}
    with overlap(trainer, **amounts) as rollouts:
        witness = Witness(trainer, own)
        ppo_trainer.batch_generation, ppo_trainer.get_reward = witness.batch_generation, witness.get_reward
        yield rollouts, witness
    assert {name: getattr(ppo_trainer, name) for name in FUNCTIONS} == own


def replayed(trainer: Any, rollouts: list[tuple[torch.Tensor, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL alone, on the answers that were made before."""
    left = iter(rollouts)

    def generation(model: Any, queries: torch.Tensor, _size: int, pad: int, _config: Any) -> Any:
        _, rows = next(left)
        return rows, logits_of(model, rows, queries.shape[1], pad, trainer.args.temperature)

    trainer.dataloader = [{"input_ids": queries} for queries, _ in rollouts]
    with monkeypatch.context() as patched:
        patched.setattr(ppo_trainer, "batch_generation", generation)
        trained(trainer)


@pytest.mark.parametrize(
    ("pad", "changes"),
    [("<pad>", {}), ("<eos>", {"gradient_checkpointing": False}), ("<pad>", {"stop_token": None, "missing_eos_penalty": 1.0})],
    ids=["pad", "pad-is-eos", "no-stop-token"],
)
def test_without_overcommit_it_trains_what_trl_trains_on_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pad: str, changes: dict[str, Any]
) -> None:
    ours = trainer_of(tmp_path, pad, **changes)
    with witnessed(ours, chunk=3) as (rollouts, witness):
        trained(ours)
    assert rollouts.steps == len(witness.rollouts) == 4
    assert witness.scores == 4 * BATCH
    assert (rollouts.deferred, rollouts.unconsumed) == (0, [])
    plain = trainer_of(tmp_path, pad, **changes)
    before = {name: weight.clone() for name, weight in plain.model.state_dict().items()}
    replayed(plain, witness.rollouts, monkeypatch)
    moved = 0.0
    for name, weight in plain.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], weight, rtol=0, atol=1e-4)
        moved = max(moved, float((weight - before[name]).abs().max()))
    assert moved > 2e-3, "the weights have moved much further than they differ"
    for step, other in zip(ours.state.log_history, plain.state.log_history, strict=True):
        for name in ("objective/kl", "objective/scores", "objective/entropy", "loss/value_avg", "loss/policy_avg"):
            assert step[name] == pytest.approx(other[name], abs=1e-3), name


def test_with_overcommit_every_prompt_is_trained_once_or_in_flight(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, num_sample_generations=2, total_episodes=6 * BATCH)
    with witnessed(trainer, overcommit=3, chunk=3, max_age=2) as (rollouts, witness):
        trained(trainer)
    assert witness.passed_on, "the samples for the eye are TRL's own"
    seen = [row[row != PAD].tolist() for queries, _ in witness.rollouts for row in queries]
    seen += [sequence.prompt.tolist() for sequence in rollouts.unconsumed]
    assert len(seen) == 6 * BATCH + 3
    assert all(seen.count(prompt) == 1 and prompt in PROMPTS for prompt in seen)
    assert rollouts.deferred > 3
    assert witness.scores == 6 * BATCH
    assert all(math.isfinite(value) for step in trainer.state.log_history for value in step.values())


def test_the_trainer_is_left_as_it_was(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    loader, attention = trainer.dataloader, trainer.policy_model.config._attn_implementation
    told = logging.get_verbosity(), logging.is_progress_bar_enabled()

    def inside(act: Callable[[], object]) -> None:
        with overlap(trainer):
            assert trainer.dataloader is not loader
            act()

    with pytest.raises(OverlapError, match="already overlapped"):
        inside(lambda: overlap(trainer).__enter__())
    with pytest.raises(ZeroDivisionError):
        inside(lambda: 1 / 0)
    assert trainer.dataloader is loader
    assert trainer.policy_model.config._attn_implementation == attention == "sdpa"
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == told
    assert ppo_trainer.get_reward.__module__.startswith("trl.")
    with pytest.raises(ValueError, match="do not fit a context of 64"), overlap(trainer, max_prompt=50):
        pass

"""TRL's part of `oppo bench trl`: its PPOTrainer or GRPOTrainer, one step at a time, in TRL's own environment.

Started by path as `python peer.py CONFIG.json`; imports none of our packages. A line on stdin requests one step; a line of JSON
on stdout is the result. A logits processor forces EOS at each answer's fixed length and forbids it before, so that generation
stops when the longest answer of the batch is complete.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)

if TYPE_CHECKING:
    from trl import GRPOTrainer
    from trl.experimental.ppo import PPOTrainer

ADAPTER_ALPHA = 32  # the engine's default


class FixedLengthEnds(LogitsProcessor):  # type: ignore[misc]
    """Forces EOS as token number `ends_B` of each row (from 1), and no sooner; never one of the tokens `forbidden`."""

    def __init__(self, ends_B: torch.Tensor, context: int, eos: int, forbidden: list[int]) -> None:
        self.ends_B, self.context, self.eos, self.forbidden = ends_B, context, eos, forbidden

    def __call__(self, input_ids: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, in place."""
        due_B = self.ends_B <= input_ids.shape[1] - self.context + 1
        scores_BV[:, self.forbidden] = -torch.inf
        scores_BV[due_B] = -torch.inf
        scores_BV[due_B, self.eos] = 0.0
        return scores_BV


class Work:
    """The next answer lengths, and the last batch."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.lengths: list[int] = config["lengths"]
        self.batch: int = config["batch"]
        self.used = 0
        self.tokens = 0

    def fix_lengths(self, model: Any, eos: int, pad: int) -> None:
        """Let `model.generate` end each answer at its fixed length."""
        own = model.generate
        ends_too = model.generation_config.eos_token_id or []  # a model may end at several tokens
        forbidden = sorted({eos, pad, *([ends_too] if isinstance(ends_too, int) else ends_too)})

        def generate(input_ids: torch.Tensor, **given: Any) -> Any:
            ends = self.lengths[self.used : self.used + self.batch]
            self.used += self.batch
            processors = LogitsProcessorList([FixedLengthEnds(torch.tensor(ends), input_ids.shape[1], eos, forbidden)])
            made = own(input_ids=input_ids, **given, logits_processor=processors, eos_token_id=eos, pad_token_id=pad)
            sequences = made if isinstance(made, torch.Tensor) else made.sequences
            self.tokens = self._checked(sequences[:, input_ids.shape[1] :], ends, eos)
            return made

        model.generate = generate

    @staticmethod
    def _checked(responses: torch.Tensor, ends: list[int], eos: int) -> int:
        """Response tokens of a batch. Raises RuntimeError when an answer has a wrong length."""
        written = (responses == eos).int().argmax(1) + 1
        if written.tolist() != ends or responses.shape[1] != max(ends):
            raise RuntimeError(f"lengths {ends} were imposed, but {written.tolist()} came out in {responses.shape[1]} rounds")
        return sum(ends)


class TurnByTurn(TrainerCallback):  # type: ignore[misc]
    """Waits before every step for a request, and reports when it is done."""

    def __init__(self, work: Work, asked: TextIO, answers: TextIO) -> None:
        self.work, self.asked, self.answers = work, asked, answers
        self.start = 0.0

    def on_train_begin(self, *given: Any, **named: Any) -> None:
        """Everything is loaded."""
        self._tell({"ready": True})
        self._wait()

    def on_step_end(self, *given: Any, **named: Any) -> None:
        """A step is done; freeing its tensors counts as time of the next."""
        self._tell({"seconds": time.perf_counter() - self.start, "tokens": self.work.tokens})
        self._wait()

    def _tell(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self.answers, flush=True)

    def _wait(self) -> None:
        if not self.asked.readline():
            os._exit(0)
        self.start = time.perf_counter()


def adapters(model: Any, rank: int) -> Any:
    """peft's configuration of adapters on every linear layer of the blocks, as the engine's default has them."""
    from peft import LoraConfig

    parts = ((name.split("."), module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    linear = {path[-1] for path, _ in parts if any(part.isdigit() for part in path)}
    return LoraConfig(r=rank, lora_alpha=ADAPTER_ALPHA, target_modules=sorted(linear))


def add_adapters(model: Any, rank: int) -> None:
    """Put adapters into the model; they alone are trained."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(adapters(model, rank), model)


def read_tokenizer(folder: str) -> Any:
    """The tokenizer, which pads prompts on the left, with EOS where it has no token for that."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def build_trainer(config: dict[str, Any], work: Work, callback: TurnByTurn) -> PPOTrainer:
    """TRL's trainer for the same work: full precision, no gradient checkpointing, one pass per batch."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = read_tokenizer(config["actor"])
    policy, reference = (AutoModelForCausalLM.from_pretrained(config["actor"], dtype=torch.float32) for _ in range(2))
    reward, value = (AutoModelForSequenceClassification.from_pretrained(config["reward"], dtype=torch.float32) for _ in range(2))
    rank = config.get("lora")
    if rank:
        for model in (policy, value):
            add_adapters(model, rank)
        value.score.requires_grad_(True)
    work.fix_lengths(policy, tokenizer.eos_token_id, tokenizer.pad_token_id)
    passes = config["batch"] // config["rows_a_pass"]
    args = PPOConfig(
        output_dir=config["out"], use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
        save_strategy="no", num_sample_generations=0, seed=config["seed"], learning_rate=1e-6, temperature=1.0,
        per_device_train_batch_size=config["rows_a_pass"], gradient_accumulation_steps=passes, num_mini_batches=1,
        local_rollout_forward_batch_size=config["batch"], num_ppo_epochs=1,
        response_length=config["longest"], stop_token="eos", total_episodes=len(work.lengths),
    )  # fmt: skip
    data = Dataset.from_list([{"input_ids": prompt} for prompt in config["prompts"]])
    return PPOTrainer(
        args, tokenizer, model=policy, ref_model=reference, reward_model=reward, value_model=value,
        train_dataset=data, eval_dataset=data, callbacks=[callback],
    )  # fmt: skip


def build_grpo_trainer(config: dict[str, Any], work: Work, callback: TurnByTurn) -> GRPOTrainer:
    """TRL's trainer of `group` answers to each prompt, with the reward model and a KL penalty in the loss."""
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = read_tokenizer(config["actor"])
    policy = AutoModelForCausalLM.from_pretrained(config["actor"], dtype=torch.float32)
    reward = AutoModelForSequenceClassification.from_pretrained(config["reward"], dtype=torch.float32)
    passes = config["batch"] // config["rows_a_pass"]
    args = GRPOConfig(
        output_dir=config["out"], use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
        save_strategy="no", seed=config["seed"], learning_rate=1e-6, temperature=1.0, beta=config["kl"], num_iterations=1,
        per_device_train_batch_size=config["rows_a_pass"], gradient_accumulation_steps=passes, num_generations=config["group"],
        max_completion_length=config["longest"], max_steps=len(work.lengths) // work.batch,
    )  # fmt: skip
    prompts = [{"prompt": tokenizer.decode(ids)} for ids in config["prompts"]]
    trainer = GRPOTrainer(
        policy, [reward], args=args, train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer, reward_processing_classes=[AutoTokenizer.from_pretrained(config["reward"])],
        peft_config=adapters(policy, config["lora"]), callbacks=[callback],
    )  # fmt: skip
    work.fix_lengths(trainer.model, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return trainer


def main() -> None:
    """Train as many steps as there are lengths, one per request."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the libraries' output out of the result
    config = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(config["threads"])
    work = Work(config)
    build = build_grpo_trainer if "group" in config else build_trainer
    build(config, work, TurnByTurn(work, sys.stdin, answers)).train()


if __name__ == "__main__":
    main()

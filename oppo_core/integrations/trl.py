"""Overlap for TRL's PPOTrainer (trl 1.12, the last release that has it), in the user's process and with the user's models:

    with overlap(trainer, overcommit=8, chunk=64):
        trainer.train()

TRL draws prompts from its data loader, generates, scores and trains in sequence. Within the block, the data loader produces a
rollout at each step: chunked decoding with a streamed reward model. It returns the prompts of the batch. Three functions of TRL's
module then return known results: `batch_generation` the responses, `selective_log_softmax` their log-probs under the current
weights, `get_reward` their scores. For other rows or models they call TRL's functions (docs/how-to/trl.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.integrations.rollouts import Overlap, Rollout, Rollouts
from oppo_core.integrations.trl_compat import FUNCTIONS, OverlapError, check_amounts, check_trainer
from oppo_core.models.microbatching import right_padded
from oppo_core.models.protocol import Network
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.sequence import Sequence

# TRL adds this to the temperature, in sampling and in training.
TEMPERATURE_MARGIN = 1e-7
# Padded tokens per forward pass without a graph.
PASS_TOKENS = 8192
NO_TOKEN = -1


@contextmanager
def overlap(
    trainer: Any, *, overcommit: int = 0, chunk: int = 64, max_age: int = 1, max_prompt: int | None = None
) -> Iterator[Rollouts]:
    """Within the block `trainer.train()` overlaps generation and rewards; yields the rollouts, which count steps and deferrals.

    Args:
        trainer: a `trl.experimental.ppo.PPOTrainer`.
        overcommit: extra sequences in flight, at most one batch. 0: every step trains its own prompts, as in TRL. Otherwise
            the first sequences to finish make up the batch and the others are deferred; TRL does not correct for stale tokens.
        chunk: tokens per chunk streamed to the reward model. Changes timing only.
        max_age: steps for which a sequence may be deferred.
        max_prompt: tokens of the longest prompt; computed from the dataset by default.

    Raises:
        OverlapError: this trainer cannot be overlapped; the message names the reason.
        ModelFolderError: a model cannot be streamed exactly.
    """
    functions = check_trainer(trainer)
    check_amounts(trainer, overcommit, chunk, max_age)
    args, pad = trainer.args, trainer.processing_class.pad_token_id
    policy = trainer.accelerator.unwrap_model(trainer.model).policy
    amounts = Overlap(args.local_batch_size, overcommit, chunk, max_age)
    with ExitStack() as after:
        networks = [after.enter_context(streaming_network(model)) for model in (policy, trainer.reward_model)]
        prompts = dataset_prompts(trainer.dataloader, pad)
        settings = decode_settings(trainer, max_prompt or longest_prompt(trainer.train_dataset), networks)
        rollouts = Rollouts(networks[0], networks[1], prompts, amounts, settings, lambda s: judged_tokens(s, pad))
        after.callback(rollouts.close)
        for holder, name, value in TrainerPatches(trainer, rollouts, policy, functions).patches():
            after.enter_context(patched(holder, name, value))
        yield rollouts


def decode_settings(trainer: Any, max_prompt: int, networks: list[Network]) -> DecodeSettings:
    """TRL's sampling settings for the decoder. Raises ValueError if prompt and response exceed a model's context."""
    args, stop = trainer.args, trainer.stop_token_id
    longest, context = max_prompt + args.response_length, min(network.context for network in networks)
    if longest > context:
        raise ValueError(
            f"prompts of up to {max_prompt} tokens and responses of {args.response_length} do not fit a context of {context};"
            " lower response_length, or leave out long prompts"
        )
    return DecodeSettings(
        args.seed, NO_TOKEN if stop is None else stop, args.temperature + TEMPERATURE_MARGIN, max_prompt, args.response_length,
        PASS_TOKENS, scores_stale_tokens=True,
    )  # fmt: skip


def longest_prompt(dataset: Any) -> int:
    """Tokens of the longest prompt. Raises OverlapError if the dataset does not provide it."""
    try:
        return max(len(row) for row in dataset["input_ids"])
    except (KeyError, TypeError, ValueError):
        raise OverlapError("the dataset has no column input_ids to compute the longest prompt from; set max_prompt") from None


def dataset_prompts(loader: Any, pad: int) -> Iterator[NDArray[np.int64]]:
    """Prompts in TRL's order, without pad tokens (which TRL masks), for any number of epochs."""
    while True:
        count = 0
        for batch in loader:
            for row in batch["input_ids"].cpu().numpy():
                count += 1
                yield row[row != pad].astype(np.int64)
        if not count:
            raise ValueError("the data loader is empty: the dataset has fewer prompts than a batch")


def judged_tokens(sequence: Sequence, pad: int) -> NDArray[np.int64]:
    """The tokens that TRL's reward model scores: prompt and response up to the first pad token, which may be the end-of-sequence
    token."""
    response = sequence.response
    seen = response.index(pad) if pad in response else len(response)
    return np.concatenate([sequence.prompt, np.asarray(response[:seen], dtype=np.int64)])


@contextmanager
def streaming_network(model: Any) -> Iterator[Network]:
    """The trainer's model as a `Network`; within the block it uses our attention function instead of sdpa."""
    with _restore_logging():
        from oppo_core.models.attention import FUSED
        from oppo_core.models.huggingface_io import wrap_model
    before = model.config._attn_implementation
    if before == "sdpa":
        model.set_attn_implementation(FUSED)
    try:
        with eval_mode(model):
            network = wrap_model(model)
        yield network
    finally:
        model.set_attn_implementation(before)


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Evaluation mode: in training mode, transformers drops the KV cache if gradient checkpointing is on."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


@contextmanager
def _restore_logging() -> Iterator[None]:
    """Restore transformers' logging, which our models' module turns off."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()


@contextmanager
def patched(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set `name` of `holder` to `value`: a key of a dictionary, otherwise an attribute."""
    has, put = (dict.__getitem__, dict.__setitem__) if isinstance(holder, dict) else (getattr, setattr)
    before = has(holder, name)
    put(holder, name, value)
    try:
        yield
    finally:
        put(holder, name, before)


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Passed to TRL in place of logits [B, T, V]: the log-probs [B, T] of the response tokens."""

    logprobs: Tensor

    def __getitem__(self, rows: slice) -> LogProbs:
        return LogProbs(self.logprobs[rows])


@dataclass(frozen=True, slots=True)
class Batch:
    """A rollout in TRL's format: `queries` [B, P] left-padded, `responses` [B, T] right-padded, `scores` by the judged tokens."""

    queries: Tensor
    responses: Tensor
    rated: LogProbs
    scores: dict[bytes, float]

    @classmethod
    def from_rollout(cls, rollout: Rollout, pad: int, device: torch.device) -> Batch:
        """On `device`. Log-probs are those of the current weights, also for stale tokens."""
        sequences = rollout.sequences
        responses = right_padded([np.asarray(s.response, dtype=np.int64) for s in sequences], pad)
        logprobs = torch.zeros(responses.shape)
        for row, sequence in enumerate(sequences):
            logprobs[row, : sequence.length] = torch.tensor(sequence.proximal())
        queries = right_padded([s.prompt[::-1] for s in sequences], pad).flip(1)
        judged = [judged_tokens(s, pad).tobytes() for s in sequences]
        scores = dict(zip(judged, rollout.scores, strict=True))
        return cls(queries.to(device), responses.to(device), LogProbs(logprobs.to(device)), scores)

    def lookup_scores(self, rows: Tensor, pad: int, context: int) -> list[float] | None:
        """Scores of `rows` [N, P + T] whose responses start at `context`; None unless all are known."""
        tokens = []
        for row in rows.cpu().numpy():
            prompt, response = row[:context], row[context:]
            seen = int((response == pad).argmax()) if (response == pad).any() else len(response)
            tokens.append(self.scores.get(np.concatenate([prompt[prompt != pad], response[:seen]]).tobytes()))
        known = [score for score in tokens if score is not None]
        return known if len(known) == len(tokens) else None


class TrainerPatches:
    """The data loader and the three functions: they return the results of the last batch, and call TRL's for everything else."""

    def __init__(self, trainer: Any, rollouts: Rollouts, policy: Any, functions: dict[str, Any]) -> None:
        """`functions`: the namespace of TRL's module."""
        self._trainer, self._rollouts, self._policy = trainer, rollouts, policy
        self._functions = functions
        self._own: dict[str, Callable[..., Any]] = {name: functions[name] for name in FUNCTIONS}
        self._loader = trainer.dataloader
        self._batch: Batch | None = None

    def patches(self) -> list[tuple[Any, str, Any]]:
        """Patches: (holder, name, value)."""
        return [(self._functions, name, getattr(self, name)) for name in FUNCTIONS] + [(self._trainer, "dataloader", self)]

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Prompts of the batches, without end; each is rolled out when it is drawn."""
        while True:
            with eval_mode(self._policy), eval_mode(self._trainer.reward_model):
                rollout = self._rollouts.next()
            self._batch = Batch.from_rollout(
                rollout, self._trainer.processing_class.pad_token_id, self._trainer.accelerator.device
            )
            yield {"input_ids": self._batch.queries}

    def batch_generation(
        self, model: Any, queries: Tensor, local_rollout_forward_batch_size: int, pad_token_id: int, generation_config: Any
    ) -> tuple[Tensor, Any]:
        """Replaces TRL's function."""
        batch = self._batch
        if batch is None or model is not self._policy or not torch.equal(queries, batch.queries):
            own: tuple[Tensor, Any] = self._own["batch_generation"](
                model, queries, local_rollout_forward_batch_size, pad_token_id, generation_config
            )
            return own
        return torch.cat([batch.queries, batch.responses], dim=1), batch.rated

    def selective_log_softmax(self, logits: Any, index: Tensor) -> Tensor:
        """Replaces TRL's function."""
        tokens: Tensor = logits.logprobs if isinstance(logits, LogProbs) else self._own["selective_log_softmax"](logits, index)
        return tokens

    def get_reward(self, model: Any, query_responses: Tensor, pad_token_id: int, context_length: int) -> tuple[Any, Tensor, Any]:
        """Replaces TRL's function; for known rows it returns only the scores, which is all that `train` uses."""
        known = None
        if self._batch is not None and model is self._trainer.reward_model:
            known = self._batch.lookup_scores(query_responses, pad_token_id, context_length)
        if known is not None:
            return None, torch.tensor(known, device=query_responses.device), None
        own: tuple[Any, Tensor, Any] = self._own["get_reward"](model, query_responses, pad_token_id, context_length)
        return own

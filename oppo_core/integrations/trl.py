"""Our overlap for TRL's PPOTrainer (trl 1.12, the last release that has it), in the process and with the models of its user:

    with overlap(trainer, overcommit=8, chunk=64):
        trainer.train()

TRL asks its data loader for prompts, generates, scores and trains, one after the other. Within the block its data loader makes a
whole rollout of ours when it is asked: answers are decoded chunk by chunk while the reward model reads them, and the prompts of
those that make up the batch are handed over. Three functions that `train` looks up in its module then give what is known already:
`batch_generation` the answers, `selective_log_softmax` their log-probs under the present weights, `get_reward` their scores.
Whatever TRL asks them about other rows or other models they pass on. Everything else is TRL's (docs/how-to/trl.md).
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
from oppo_core.integrations.trl_compat import FUNCTIONS, OverlapError, refuse, refuse_amounts
from oppo_core.models.microbatching import right_padded
from oppo_core.models.protocol import Network
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.sequence import Sequence

# TRL divides by the temperature plus this, in sampling and in training.
TEMPERATURE_MARGIN = 1e-7
# Most padded tokens of one pass of ours that keeps no graph.
PASS_TOKENS = 8192
NO_TOKEN = -1


@contextmanager
def overlap(
    trainer: Any, *, overcommit: int = 0, chunk: int = 64, max_age: int = 1, max_prompt: int | None = None
) -> Iterator[Rollouts]:
    """Within it `trainer.train()` overlaps generation and rewards; what is yielded counts steps and deferred answers.

    Args:
        trainer: a `trl.experimental.ppo.PPOTrainer`.
        overcommit: answers in flight beyond a batch, at most one batch. 0: every step trains its own prompts, as in TRL. More:
            the batch is who finishes first; the others go on in the next step, and TRL does not correct for their older tokens.
        chunk: tokens that are decoded between two hand-overs to the reward model. Changes timing only.
        max_age: steps for which an answer may be deferred.
        max_prompt: tokens of the longest prompt; by default the dataset is searched.

    Raises:
        OverlapError: what this trainer does cannot be overlapped; the reason is named.
        ModelFolderError: a model cannot be read in chunks exactly.
    """
    functions = refuse(trainer)
    refuse_amounts(trainer, overcommit, chunk, max_age)
    args, pad = trainer.args, trainer.processing_class.pad_token_id
    policy = trainer.accelerator.unwrap_model(trainer.model).policy
    amounts = Overlap(args.local_batch_size, overcommit, chunk, max_age)
    with ExitStack() as after:
        networks = [after.enter_context(streaming(model)) for model in (policy, trainer.reward_model)]
        prompts = dataset_prompts(trainer.dataloader, pad)
        settings = settings_of(trainer, max_prompt or longest_prompt(trainer.train_dataset), networks)
        rollouts = Rollouts(networks[0], networks[1], prompts, amounts, settings, lambda s: shown(s, pad))
        after.callback(rollouts.close)
        for holder, name, value in StandIn(trainer, rollouts, policy, functions).replacements():
            after.enter_context(replaced(holder, name, value))
        yield rollouts


def settings_of(trainer: Any, max_prompt: int, networks: list[Network]) -> DecodeSettings:
    """How TRL samples, as our decoder's settings. Raises ValueError when prompt and answer exceed a model's context."""
    args, stop = trainer.args, trainer.stop_token_id
    longest, context = max_prompt + args.response_length, min(network.context for network in networks)
    if longest > context:
        raise ValueError(
            f"prompts of up to {max_prompt} tokens and answers of {args.response_length} do not fit a context of {context}; lower"
            " response_length, or leave out long prompts"
        )
    return DecodeSettings(
        args.seed, NO_TOKEN if stop is None else stop, args.temperature + TEMPERATURE_MARGIN, max_prompt, args.response_length,
        PASS_TOKENS, scores_stale_tokens=True,
    )  # fmt: skip


def longest_prompt(dataset: Any) -> int:
    """Tokens of the longest prompt. Raises OverlapError when it cannot be told from the dataset."""
    try:
        return max(len(row) for row in dataset["input_ids"])
    except (KeyError, TypeError, ValueError):
        raise OverlapError("the dataset has no column input_ids to tell the longest prompt by; name it as max_prompt") from None


def dataset_prompts(loader: Any, pad: int) -> Iterator[NDArray[np.int64]]:
    """Prompts in the order in which TRL draws them, without the pad tokens, which it masks; epoch after epoch."""
    while True:
        result = 0
        for batch in loader:
            for row in batch["input_ids"].cpu().numpy():
                result += 1
                yield row[row != pad].astype(np.int64)
        if not result:
            raise ValueError("the data loader gives no batch: the dataset has fewer prompts than a batch")


def shown(sequence: Sequence, pad: int) -> NDArray[np.int64]:
    """What TRL has its reward model judge: prompt and answer up to the first pad token, which may be the end-of-sequence one."""
    response = sequence.response
    seen = response.index(pad) if pad in response else len(response)
    return np.concatenate([sequence.prompt, np.asarray(response[:seen], dtype=np.int64)])


@contextmanager
def streaming(model: Any) -> Iterator[Network]:
    """A network around a model of the trainer, which within it uses our attention function where it would use torch's."""
    with _logging_as_it_was():
        from oppo_core.models.attention import FUSED
        from oppo_core.models.huggingface_io import wrap_model
    before = model.config._attn_implementation
    if before == "sdpa":
        model.set_attn_implementation(FUSED)
    try:
        with evaluating(model):
            network = wrap_model(model)
        yield network
    finally:
        model.set_attn_implementation(before)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Not training: else transformers drops the cache wherever gradients are checkpointed."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


@contextmanager
def _logging_as_it_was() -> Iterator[None]:
    """Our models' module switches transformers' reports off, which are its user's here."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """`holder` has `value` under `name`; a dictionary as a key, anything else as an attribute."""
    has, put = (dict.__getitem__, dict.__setitem__) if isinstance(holder, dict) else (getattr, setattr)
    before = has(holder, name)
    put(holder, name, value)
    try:
        yield
    finally:
        put(holder, name, before)


@dataclass(frozen=True, slots=True)
class Rated:
    """Stands where TRL expects logits [B, T, V] of an answer's tokens: their log-probs [B, T]."""

    logprobs: Tensor

    def __getitem__(self, rows: slice) -> Rated:
        return Rated(self.logprobs[rows])


@dataclass(frozen=True, slots=True)
class Batch:
    """A rollout as TRL sees it: `queries` [B, P] left-padded, `responses` [B, T] right-padded, `scores` by the tokens judged."""

    queries: Tensor
    responses: Tensor
    rated: Rated
    scores: dict[bytes, float]

    @classmethod
    def of(cls, rollout: Rollout, pad: int, device: torch.device) -> Batch:
        """On `device`. Log-probs are those of the present weights, also of tokens that older ones have sampled."""
        sequences = rollout.sequences
        responses = right_padded([np.asarray(s.response, dtype=np.int64) for s in sequences], pad)
        logprobs = torch.zeros(responses.shape)
        for row, sequence in enumerate(sequences):
            logprobs[row, : sequence.length] = torch.tensor(sequence.proximal())
        queries = right_padded([s.prompt[::-1] for s in sequences], pad).flip(1)
        judged = [shown(s, pad).tobytes() for s in sequences]
        scores = dict(zip(judged, rollout.scores, strict=True))
        return cls(queries.to(device), responses.to(device), Rated(logprobs.to(device)), scores)

    def scores_of(self, rows: Tensor, pad: int, context: int) -> list[float] | None:
        """Scores of `rows` [N, P + T] whose answers begin at `context`; None when they are not all known."""
        tokens = []
        for row in rows.cpu().numpy():
            prompt, response = row[:context], row[context:]
            seen = int((response == pad).argmax()) if (response == pad).any() else len(response)
            tokens.append(self.scores.get(np.concatenate([prompt[prompt != pad], response[:seen]]).tobytes()))
        known = [score for score in tokens if score is not None]
        return known if len(known) == len(tokens) else None


class StandIn:
    """The data loader and the three functions, which tell of the batch that was handed over last and pass on all else."""

    def __init__(self, trainer: Any, rollouts: Rollouts, policy: Any, functions: dict[str, Any]) -> None:
        """`functions`: the names of TRL's module."""
        self._trainer, self._rollouts, self._policy = trainer, rollouts, policy
        self._functions = functions
        self._own: dict[str, Callable[..., Any]] = {name: functions[name] for name in FUNCTIONS}
        self._loader = trainer.dataloader
        self._batch: Batch | None = None

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """What stands in for what: holder, name, value."""
        return [(self._functions, name, getattr(self, name)) for name in FUNCTIONS] + [(self._trainer, "dataloader", self)]

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Prompts of one batch after the other, without end: each is rolled out when it is asked for."""
        while True:
            with evaluating(self._policy), evaluating(self._trainer.reward_model):
                rollout = self._rollouts.next()
            self._batch = Batch.of(rollout, self._trainer.processing_class.pad_token_id, self._trainer.accelerator.device)
            yield {"input_ids": self._batch.queries}

    def batch_generation(
        self, model: Any, queries: Tensor, local_rollout_forward_batch_size: int, pad_token_id: int, generation_config: Any
    ) -> tuple[Tensor, Any]:
        """TRL's function of that name."""
        batch = self._batch
        if batch is None or model is not self._policy or not torch.equal(queries, batch.queries):
            own: tuple[Tensor, Any] = self._own["batch_generation"](
                model, queries, local_rollout_forward_batch_size, pad_token_id, generation_config
            )
            return own
        return torch.cat([batch.queries, batch.responses], dim=1), batch.rated

    def selective_log_softmax(self, logits: Any, index: Tensor) -> Tensor:
        """TRL's function of that name."""
        tokens: Tensor = logits.logprobs if isinstance(logits, Rated) else self._own["selective_log_softmax"](logits, index)
        return tokens

    def get_reward(self, model: Any, query_responses: Tensor, pad_token_id: int, context_length: int) -> tuple[Any, Tensor, Any]:
        """TRL's function of that name; of known rows it tells the scores alone, because `train` asks for no more."""
        known = None
        if self._batch is not None and model is self._trainer.reward_model:
            known = self._batch.scores_of(query_responses, pad_token_id, context_length)
        if known is not None:
            return None, torch.tensor(known, device=query_responses.device), None
        own: tuple[Any, Tensor, Any] = self._own["get_reward"](model, query_responses, pad_token_id, context_length)
        return own

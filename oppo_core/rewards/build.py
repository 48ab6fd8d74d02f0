"""Builds the parts of a run's reward from `models.reward` of its spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from oppo_contract.model_folder import ModelFolderError, find
from oppo_contract.spec import ModelSpec, RewardPart, RunSpec
from oppo_core.models.model_io import load_model
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network
from oppo_core.rewards.composite import Part, Rewards
from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.prompt_records import MESSAGES, PromptRecords
from oppo_core.rewards.protocol import FinishedReward, StreamingReward
from oppo_core.rewards.registry import find_rule
from oppo_core.rewards.rule import RuleReward, needs_line
from oppo_core.rewards.sharded_model import ShardedModelReward
from oppo_core.rewards.text_model import Encode, TextModelReward, chat_encoder, text_encoder
from oppo_core.rollout.conversations import Conversations, read_conversations
from oppo_core.rollout.prompts import prompt_files
from oppo_core.rollout.tokenizer import TextCodec, load_codec
from oppo_core.training.sharded_module import ShardedModule
from oppo_estimate.shapes import read_shape

SEED_STRIDE = 1009


@dataclass
class RewardBuilder:
    """Common arguments of all parts. `check_context` raises if a streamed network's context is too short for the run.

    `slots`: most sequences in flight. `shard`: shards a model over the ranks (`training.backend: fsdp2`); None: it stays whole.
    """

    spec: RunSpec
    roots: list[Path]
    dtype: torch.dtype
    device: torch.device
    check_context: Callable[[Network], None]
    slots: int = 1
    shard: Callable[[Network], ShardedModule] | None = None
    codec: TextCodec = field(init=False)

    def __post_init__(self) -> None:
        self.codec = load_codec(self.spec.models.actor, self.roots)

    def rewards(self) -> Rewards:
        """Every part of the run's reward, ready to score.

        Raises:
            RewardError, ModelFolderError: a part cannot be built or does not fit.
        """
        sources = self.spec.models.reward.sources()
        reads_texts = any(source.model is None or source.reads != "tokens" for source in sources)
        conversations = read_conversations(self.spec, self.roots, self.codec) if reads_texts else Conversations()
        rewards = Rewards([], self.codec, conversations)
        try:
            for number, source in enumerate(sources):
                rewards.parts.append(self._part(source, number))
        except Exception:
            rewards.close()
            raise
        return rewards

    def _part(self, source: RewardPart, number: int) -> Part:
        if source.model is None:
            return Part(source.weight, finished=self._finished_reward(source))
        if source.reads == "tokens":
            check_same_tokens(self.spec.models.actor, source.model, self.roots)
        if source.served_by == "vllm":
            served = self._served(source.model, source.memory_share)
            return Part(source.weight, finished=served, streaming=served)
        # Seeds of built-in models: the actor's + 1 for the first part; the others are SEED_STRIDE apart, so no two are equal.
        seed = self.spec.seed + 1 + SEED_STRIDE * number
        sharded = self.shard is not None
        network = load_model(source.model, "scalar", self.roots, self.dtype, seed, device=self.device, sharded=sharded)
        if source.reads == "tokens":
            self.check_context(network)
            if self.shard is None:
                return Part(source.weight, network)
        encoder, tokens = self._encoder(source.model, source.reads), self.spec.ppo.micro_batch_tokens
        if self.shard is not None:
            return Part(source.weight, finished=ShardedModelReward(self.shard(network), encoder, tokens))
        return Part(source.weight, finished=TextModelReward(network, encoder, PassBudget(tokens, name="text-reads")))

    def _served(self, model: ModelSpec, memory_share: float) -> StreamingReward:
        """A model served by vLLM."""
        from oppo_core.rewards.vllm_model import build_vllm_reward
        from oppo_core.vllm.engine_args import Placement, cpu_cache_bytes, reward_arguments

        assert model.path is not None  # the spec's validator guarantees it
        r, resources = self.spec.rollout, self.spec.resources
        longest, folder = r.max_prompt_tokens + r.max_new_tokens, find(model.path, self.roots)
        if self.device.type == "cuda":
            placement = Placement((self.device.index or 0,), memory_share)
        else:
            shape = read_shape(model, "scalar", self.roots)
            assert shape is not None  # the folder was found
            placement = Placement(cache_bytes=cpu_cache_bytes(self.slots, longest, shape.cached * self.dtype.itemsize))
        arguments = reward_arguments(str(folder), resources.dtype, longest, self.slots, placement)
        return build_vllm_reward(folder, arguments, resources.longest_silence_s, placement)

    def _finished_reward(self, source: RewardPart) -> FinishedReward:
        if source.rule is not None:
            rule = find_rule(source.rule)
            records = self.records() if needs_line(source.rule, rule) else None
            # Less than the silence limit, so that the error names the rule before its process is assumed to hang.
            return RuleReward(source.rule, rule, records, 0.9 * self.spec.resources.longest_silence_s)
        from oppo_core.rewards.service import ServiceReward  # only this part needs an HTTP library

        assert source.http is not None  # the spec's validator guarantees it
        return ServiceReward(source.http, self.spec.seed, self.records() if source.http.send_line else None)

    def _encoder(self, model: ModelSpec, reads: str) -> Encode:
        if reads == "tokens":
            return lambda answer: answer.prompt_ids + answer.response_ids
        if model.tiny is not None:
            if reads == "chat":
                raise RewardError("a built-in reward model has no chat template; set reads: text (or tokens)")
            encode = load_codec(model, self.roots).encode
            return lambda answer: encode(answer.text)
        assert model.path is not None
        source = find(model.path, self.roots)
        return text_encoder(source) if reads == "text" else chat_encoder(source, self.records((MESSAGES,)))

    def records(self, keys: tuple[str, ...] | None = None) -> PromptRecords:
        """Records of the run's prompts, held-out ones included."""
        records, longest = PromptRecords(keys), self.spec.rollout.max_prompt_tokens
        for data in (self.spec.data, self.spec.evaluation):
            if data is not None:
                records.read(prompt_files(data, self.roots), data.prompt_field, self.codec, longest, data.columns)
        return records


def check_same_tokens(actor: ModelSpec, reward: ModelSpec, roots: list[Path]) -> None:
    """Raises ModelFolderError unless both tokenizers map the same text to the same ids."""
    if load_codec(actor, roots).digest != load_codec(reward, roots).digest:
        raise ModelFolderError(
            "the reward model's tokenizer differs from the actor's, so the same ids mean other text; set reads: text"
            " (or chat, for a model with a chat template) instead of tokens"
        )

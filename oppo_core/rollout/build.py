"""Builds the rollout's parts from a spec: prompt pool, decode settings and stop conditions."""

from __future__ import annotations

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.spec import RunSpec
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.pool import Pool
from oppo_core.rollout.sampling import Filters
from oppo_core.rollout.stop_conditions import StopConditions
from oppo_core.rollout.tail_batch import TailBatchPool
from oppo_core.rollout.tokenizer import TextCodec


def build_pool(spec: RunSpec) -> Pool:
    """An empty pool; its class depends on `overlap.inter_step`."""
    kind = TailBatchPool if spec.overlap.inter_step == "tail_batch" else Pool
    return kind(spec.ppo.batch_size, spec.overlap.max_age, spec.ppo.group_size)


def decode_settings(spec: RunSpec, codec: TextCodec) -> DecodeSettings:
    """How the actor samples in training."""
    r = spec.rollout
    return DecodeSettings(
        spec.seed, codec.eos, r.temperature, r.max_prompt_tokens, r.max_new_tokens, spec.ppo.micro_batch_tokens,
        filters=Filters(r.top_k, r.top_p, r.min_p) if r.has_sampling_mask else None,
        keeps_cache=spec.overlap.kv_after_update == "keep",
    )  # fmt: skip


def build_stop_conditions(spec: RunSpec, codec: TextCodec) -> StopConditions | None:
    """Stop tokens and stop texts in addition to the end-of-sequence token; None if there are none.

    Raises:
        ModelFolderError: a stop token is outside the vocabulary.
    """
    r = spec.rollout
    beyond = [token for token in r.stop_tokens if token >= codec.vocab]
    if beyond:
        raise ModelFolderError(f"rollout.stop_tokens: {beyond} are outside the actor's vocabulary, 0 to {codec.vocab - 1}")
    tokens = [*r.stop_tokens, *codec.extra_eos]
    return StopConditions(tokens, r.stop_texts, codec) if tokens or r.stop_texts else None

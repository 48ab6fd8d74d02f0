"""Builds the scorers, in the process or thread that runs them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from oppo_contract.spec import RunSpec
from oppo_core.distributed.process_group import SINGLE, Ranks, Rendezvous, join
from oppo_core.models.load_roles import DTYPES, FrozenBase, check_contexts, load_actor, load_critic, load_reference
from oppo_core.models.shared_weights import copy_sharing_weights, use_shared_weights
from oppo_core.models.tensor_files import Writer
from oppo_core.ppo.actor import ActorTrainer
from oppo_core.ppo.critic import CriticTrainer
from oppo_core.rewards.build import RewardBuilder
from oppo_core.scoring.early import EarlyScorers, SharedActor
from oppo_core.scoring.scorers import Networks, ScorerSet
from oppo_core.scoring.sharded import ShardedScorers
from oppo_core.scoring.single_pass import SinglePassScorers, reads_critic_once
from oppo_core.trace.recorder import Recorder
from oppo_core.training.backends import backend_factory
from oppo_core.training.sharded_module import ShardedModule
from oppo_estimate.memory import decode_slots


def build_scorers(
    spec: RunSpec, roots: list[Path], device: torch.device, resume: Path | None, shared: SharedActor | None,
    rendezvous: Rendezvous | None, base: FrozenBase | None, streams: bool, trace: Recorder, writer: Writer | None = None,
) -> ScorerSet:  # fmt: skip
    """Load the scorers' networks in this process. With `shared`, they accumulate gradients early (update overlap).

    They join those of the other ranks at `rendezvous`. `base`: the base model of the actor's LoRA adapters. `streams`: see
    `Layout`. `writer`: of checkpoints, where it is not the default.

    Raises:
        ModelFolderError: a model is missing, too short, or its tokenizer differs from the actor's.
        RewardError: a rule is not registered, or a reward service is not allowed.
    """
    ranks = join(rendezvous, "critic", device) if spec.ppo.has_critic or spec.training.shards_weights else SINGLE
    shard = partial(ShardedModule, ranks=ranks, trained=False) if spec.training.shards_weights else None
    rewards = RewardBuilder(
        spec, roots, DTYPES[spec.resources.dtype], device, partial(check_contexts, spec), decode_slots(spec), shard
    ).rewards()
    try:
        reference = load_reference(spec, roots, device, base)
        trainer = _critic_trainer(spec, roots, device, resume, ranks)
        if trainer is not None and writer is not None:
            trainer.writer = writer
        if shard is None:
            networks = Networks(reference, trainer.network if trainer is not None else None, rewards)
            return _scorers(spec, roots, device, shared, networks, trainer, trace)
        # The base shares its weights with the network that decodes, where they stay whole.
        module = shard(reference if base is None else copy_sharing_weights(reference))
        packs = spec.training.packs and not reference.refuses_packing
        tokens, temperature = spec.ppo.micro_batch_tokens, spec.rollout.temperature
        return ShardedScorers(module, rewards, trainer, tokens, temperature, trace, ranks, streams, packs)
    except BaseException:
        rewards.close()  # stops their threads and processes
        raise


def _critic_trainer(
    spec: RunSpec, roots: list[Path], device: torch.device, resume: Path | None, ranks: Ranks
) -> CriticTrainer | None:  # fmt: skip
    """The critic's trainer, if the algorithm has one, restored from the checkpoint `resume`, if given."""
    critic = load_critic(spec, roots, device)
    if critic is None:
        return None
    trainer = CriticTrainer(critic, spec.ppo, spec.seed, spec.steps, ranks, backend_factory(spec.training), spec.training)
    if resume is not None:
        trainer.load(resume)
    return trainer


def _scorers(
    spec: RunSpec, roots: list[Path], device: torch.device, shared: SharedActor | None, networks: Networks,
    trainer: CriticTrainer | None, trace: Recorder,
) -> ScorerSet:  # fmt: skip
    """Scorers that have whole weights."""
    columns = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    cached = decode_slots(spec) if spec.overlap.intra_step == "per_chunk" else 0
    arguments = (networks, trainer, cached, columns, spec.ppo.micro_batch_tokens, spec.rollout.temperature, trace)
    if shared is None:
        return (SinglePassScorers if reads_critic_once(spec) else ScorerSet)(*arguments)
    actor, _ = load_actor(spec, roots, device)
    use_shared_weights(actor, shared.weights)
    trained = ActorTrainer(actor, spec.ppo, spec.rollout.temperature, spec.seed, spec.steps, training=spec.training)
    return EarlyScorers(*arguments).share(trained, shared.gradients)

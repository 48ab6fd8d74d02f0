"""Builds an `Engine` from a spec: models, trainers, decoder and scorers, with their processes and cores."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from oppo_contract.machine import available_cores, mib
from oppo_contract.model_folder import find
from oppo_contract.spec import RunSpec
from oppo_core.checkpointing.background import BackgroundWriter
from oppo_core.control.controllers import ChunkState, OvercommitState
from oppo_core.distributed.process_group import SINGLE, Ranks, Rendezvous
from oppo_core.engine.layout import Layout, LayoutError, build_layout, scoring_device, select_device
from oppo_core.engine.state import Engine, Progress, UpdateStrategy
from oppo_core.models.adapters import size_and_adapters
from oppo_core.models.load_roles import load_actor
from oppo_core.models.protocol import Network
from oppo_core.models.shared_weights import SHARED_MEMORY, copy_sharing_weights, move_to_shared_memory, shared_memory_shortage
from oppo_core.models.tensor_files import Writer
from oppo_core.ppo.actor import ActorTrainer
from oppo_core.ppo.early_gradients import EarlyGradients
from oppo_core.ppo.ema import MovingAverage
from oppo_core.ppo.ptx_mix import PretrainingMix, read_texts
from oppo_core.reporting.event_log import Journal
from oppo_core.rollout.build import build_pool, build_stop_conditions, decode_settings
from oppo_core.rollout.conversations import read_conversations
from oppo_core.rollout.decoder import DecoderProtocol
from oppo_core.rollout.device_decoder import build_decoder
from oppo_core.rollout.distributed_decoder import DistributedDecoder
from oppo_core.rollout.held_out import build_evaluator
from oppo_core.rollout.prompts import PromptStream, prompt_files, read_prompts
from oppo_core.rollout.tokenizer import TextCodec, load_codec
from oppo_core.scoring.build import build_scorers
from oppo_core.scoring.early import SharedActor
from oppo_core.scoring.process import ProcessScorers
from oppo_core.scoring.scorers import ScorerProtocol
from oppo_core.scoring.thread import ThreadedScorers
from oppo_core.trace.cpu_time import CpuTime
from oppo_core.trace.cuda_clock import build_recorder
from oppo_core.trace.gpu_stats import build_gpu_stats
from oppo_core.trace.recorder import Recorder
from oppo_core.training.backends import backend_factory
from oppo_core.training.optimizer import Optimizer, tensor_bytes
from oppo_core.update.nonfinite import SkippingCriticFreeUpdate, SkippingUpdate
from oppo_core.update.overlapped import OverlappedUpdate
from oppo_core.update.strategies import CriticFreeUpdate, PlainUpdate
from oppo_estimate.memory import decode_slots


def assemble(
    spec: RunSpec, roots: list[Path], out: Path, journal: Journal, threads: int | None = None, resume: Path | None = None,
    ranks: Ranks = SINGLE,
) -> Engine:  # fmt: skip
    """Load models and prompts and start the scorers. The critic's weights are loaded from the checkpoint `resume`, if given.

    The caller verifies the checkpoint before and restores the rest of it after (`checkpointing.save_restore`).

    Raises:
        ModelFolderError, PromptError: a model or prompts file is missing or unusable.
        LayoutError: the machine lacks what the spec requires.
        RankError: another rank failed.
    """
    threads = ranks.cores(min(threads or available_cores(), spec.resources.cpu_threads or available_cores()))
    torch.set_num_threads(threads)
    device = select_device(spec)
    (network, base), codec = load_actor(spec, roots, device), load_codec(spec.models.actor, roots)
    source = find(spec.models.actor.path, roots) if spec.models.actor.path is not None else None
    layout, scorer_device = build_layout(spec, device, threads, network.width, ranks.device), scoring_device(spec, device)
    trace, gpus = build_recorder(layout.actor_devices, device), (device, scorer_device)
    evaluator, actor = build_evaluator(spec, roots, network, codec, ranks), _trainer(spec, roots, network, codec, ranks)
    shared = _shared_actor(spec, layout, network, actor)
    writer = actor.writer = BackgroundWriter() if spec.training.shards_weights else Writer()
    with ExitStack() as started:  # closes started parts if a later part fails
        own_decoder = started.enter_context(closing(_decoder(spec, network, codec, source, device)))
        scoring = _start_scorers(spec, roots, layout, scorer_device, trace, resume, shared, ranks.rendezvous, base, writer)
        scorers = started.enter_context(closing(scoring))
        engine = Engine(
            spec=spec, layout=layout, codec=codec, prompts=_read_prompts(spec, roots, codec), pool=build_pool(spec),
            decoder=_on_all_ranks(own_decoder, ranks, trace, device), actor=actor, scorers=scorers, journal=journal, out=out,
            model_source=source, trace=trace, hardware=build_gpu_stats(dict(zip(layout.devices, gpus, strict=False))),
            progress=Progress(kl_coefficient=spec.ppo.kl.coefficient), overcommit=OvercommitState(spec.initial_overcommit),
            chunk=ChunkState(spec.initial_chunk_size), update=_update(spec, shared), evaluator=evaluator, ranks=ranks,
            cpu_time=CpuTime(memory=device.type == "cpu"), conversations=read_conversations(spec, roots, codec),
            parameters=size_and_adapters(network)[0], writer=writer,
        )  # fmt: skip
        started.pop_all()
    for budget in engine.budgets:
        budget.on_shrink = engine.trace.record_shrunk
    return engine


def _read_prompts(spec: RunSpec, roots: list[Path], codec: TextCodec) -> PromptStream:
    data, longest = spec.data, spec.rollout.max_prompt_tokens
    prompts = read_prompts(prompt_files(data, roots), data.prompt_field, codec, longest, columns=data.columns)
    return PromptStream(prompts, spec.seed, data.shuffle)


def _decoder(spec: RunSpec, network: Network, codec: TextCodec, source: Path | None, device: torch.device) -> DecoderProtocol:
    """The decoder of `rollout.backend`."""
    settings, stops = decode_settings(spec, codec), build_stop_conditions(spec, codec)
    if spec.rollout.backend == "torch":
        return build_decoder(network, settings, decode_slots(spec), stops)
    from oppo_core.vllm import build

    assert source is not None  # validated by the spec
    return build.build_decoder(spec, source, network, settings, stops, decode_slots(spec), device)


def _on_all_ranks(decoder: DecoderProtocol, ranks: Ranks, trace: Recorder, device: torch.device) -> DecoderProtocol:
    if ranks.world == 1:
        return decoder
    return DistributedDecoder(decoder, ranks, trace.clock, partial(trace.blocked, "tail"), device.type == "cuda")


def _trainer(spec: RunSpec, roots: list[Path], network: Network, codec: TextCodec, ranks: Ranks) -> ActorTrainer:
    """The actor's trainer, with EMA and PTX mix if the spec sets them."""
    ppo = spec.ppo
    training = spec.training
    # `network` decodes. Sharded weights are those of a second tree of modules, which is sharded in place.
    trained = copy_sharing_weights(network) if training.shards_weights else network
    trainer = ActorTrainer(
        trained, ppo, spec.rollout.temperature, spec.seed, spec.steps, ranks, backend_factory(training), training,
        spec.rollout.max_new_tokens, network,
    )  # fmt: skip
    if ppo.ema_decay is not None:
        assert isinstance(trainer.optimizer, Optimizer)  # validated by the spec
        trainer.average = MovingAverage(trainer.optimizer, ppo.ema_decay)
    if ppo.pretraining is not None:
        longest = min(ppo.pretraining.max_tokens, network.context)
        texts = read_texts(find(ppo.pretraining.data, roots), ppo.pretraining.field, codec, longest)
        trainer.mix = PretrainingMix(texts, ppo.pretraining, spec.seed, trainer.budget, training)
    return trainer


def _update(spec: RunSpec, shared: SharedActor | None) -> UpdateStrategy:
    if shared is not None:
        return OverlappedUpdate(shared.gradients)
    if spec.ppo.on_nonfinite != "raise":
        return SkippingUpdate() if spec.ppo.has_critic else SkippingCriticFreeUpdate()
    return PlainUpdate() if spec.ppo.has_critic else CriticFreeUpdate()


def _shared_actor(spec: RunSpec, layout: Layout, network: Network, actor: ActorTrainer) -> SharedActor | None:
    trains_early = spec.overlap.update_overlap and layout.streams
    return share_actor(network, actor, spec.resources.ranks_per_node) if trains_early else None


def share_actor(network: Network, actor: ActorTrainer, ranks_here: int) -> SharedActor:
    """Move the actor's weights into shared memory, in place. `ranks_here`: ranks on this machine, which do the same.

    Raises:
        LayoutError: too little shared memory.
    """
    sums = 1 + actor.ppo.whiten_advantages + actor.ppo.is_regularized
    size = sum(weight.nbytes for weight in network.state_dict().values()) + sums * tensor_bytes(actor.optimizer.parameters)
    if (free := shared_memory_shortage(size, ranks_here)) is not None:
        raise LayoutError(
            f"overlap.update_overlap needs {mib(size)} of shared memory, {SHARED_MEMORY} has {mib(free)} for each rank; give the"
            " container more (docker run --shm-size), or switch it off"
        )
    weights = {name: weight.share_memory_() for name, weight in network.state_dict().items()}  # type: ignore[no-untyped-call]
    return SharedActor(weights, EarlyGradients.shared(actor))


def _start_scorers(
    spec: RunSpec, roots: list[Path], layout: Layout, device: torch.device, trace: Recorder, resume: Path | None,
    shared: SharedActor | None, rendezvous: Rendezvous | None, base: Network | None, writer: Writer,
) -> ScorerProtocol:  # fmt: skip
    rendezvous = replace(rendezvous, serves_store=False) if rendezvous is not None else None  # the actor's group serves it
    in_thread_of_trainer = spec.training.shards_weights  # because passes are collective
    in_other_process = layout.streams and device.type == "cpu" and not in_thread_of_trainer
    here = spec.resources.ranks_per_node
    seen = move_to_shared_memory(base, here) if base is not None and in_other_process else base
    build = partial(build_scorers, spec, roots, device, resume, shared, rendezvous, seen, layout.streams)
    silence = spec.resources.longest_silence_s
    if device.type == "cuda" and (layout.streams or layout.apart) and not in_thread_of_trainer:
        return ThreadedScorers(build, build_recorder(layout.scorer_devices, device), device, trace, silence)
    if in_thread_of_trainer:
        build = partial(build, writer=writer)
    if in_other_process:
        return ProcessScorers(build, layout.scorer_devices, len(layout.scorer_devices), trace, silence)
    return build(trace)

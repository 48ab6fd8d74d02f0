"""An engine on virtual devices: every part that computes is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oppo_contract.events import Role
from oppo_contract.spec import RunSpec
from oppo_core.control.controllers import ChunkState, OvercommitState
from oppo_core.engine import step_report
from oppo_core.engine.layout import Layout, scorer_roles
from oppo_core.engine.state import Engine, Progress, may_move_rows
from oppo_core.reporting.event_log import Journal
from oppo_core.rollout.build import build_pool
from oppo_core.rollout.placement import assign_ranks, balance_rows
from oppo_core.rollout.prompts import PromptStream
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.tokenizer import ByteCodec
from oppo_core.scoring.single_pass import reads_critic_once
from oppo_core.simulation.actor import SimulatedActor
from oppo_core.simulation.decoder import SimulatedDecoder
from oppo_core.simulation.early import SimulatedEarlyScorers, no_gradients
from oppo_core.simulation.experience import SimulatedExperience
from oppo_core.simulation.lengths import Length, sample_lengths
from oppo_core.simulation.machine import Machine
from oppo_core.simulation.scorers import SimulatedScorers
from oppo_core.train import train_step
from oppo_core.update.overlapped import OverlappedUpdate
from oppo_core.update.strategies import CriticFreeUpdate, PlainUpdate
from oppo_estimate.devices import ACTOR_GROUP, READING_ROLES, Devices, DevicesError
from oppo_estimate.memory import decode_slots

PROMPTS = 64
VOCABULARY = 259  # the byte codec's smallest; placeholder tokens are never decoded


class MemoryJournal(Journal):
    """Events as (kind, payload) in memory; a step's event costs time."""

    def __init__(self, machine: Machine) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._machine = machine

    def write(self, kind: str, at: float | None = None, **payload: Any) -> None:
        """Append an event."""
        self.events.append((kind, payload))
        if kind == "step":
            self._machine.work(self._machine.devices.overheads.report_us)

    def close(self) -> None:
        pass

    @property
    def steps(self) -> list[dict[str, float]]:
        """Metrics of every step so far."""
        return [payload["metrics"] for kind, payload in self.events if kind == "step"]


class PricedPrompts(PromptStream):
    """A prompt stream whose draws cost time."""

    def __init__(self, prompts: list[NDArray[np.int64]], seed: int, shuffle: bool, machine: Machine) -> None:
        super().__init__(prompts, seed, shuffle)
        self.machine = machine

    def draw(self, number: int) -> int:
        self.machine.work(self.machine.devices.overheads.prompt_us)
        return super().draw(number)


@dataclass(slots=True, kw_only=True)
class VirtualEngine(Engine):
    """An engine whose sequences have virtual ranks: one process holds the rows of all of them."""

    machine: Machine

    def place(self, sequences: list[Sequence]) -> None:
        """Place unfinished sequences on the ranks by the engine's rule, which costs no time."""
        world = self.machine.world
        if world == 1:
            return
        slots = -(-decode_slots(self.spec) * self.spec.resources.ranks // world)
        ranks = assign_ranks(sequences, world, slots, self.spec.rollout.max_new_tokens)
        for sequence, rank in zip(sequences, ranks, strict=True):
            sequence.rank = rank
        self.machine.rank_of = {s.sequence_id: s.rank or 0 for s in self.pool.sequences}

    def balance(self, rows: list[Sequence]) -> None:
        """Choose the rank that trains each row of the batch by the engine's rule; moving rows costs no time."""
        world = self.machine.world
        if world == 1:
            return
        if may_move_rows(self.spec):
            for sequence, rank in zip(rows, balance_rows(rows, world), strict=True):
                sequence.rank = rank
        self.machine.batch_ranks = [s.rank or 0 for s in rows]
        self.machine.rank_of |= {s.sequence_id: s.rank or 0 for s in rows}


@dataclass(frozen=True, slots=True)
class VirtualLayout(Layout):
    """A layout with every scorer on the devices of its description."""

    places: tuple[tuple[str, Role], ...] = ()

    def lanes(self) -> list[tuple[str, Role]]:
        """(device, role) pairs in drawing order."""
        actor: list[tuple[str, Role]] = [(device, "actor") for device in self.actor_devices]
        return actor + list(self.places)


def virtual_layout(spec: RunSpec, devices: Devices, machine: Machine) -> VirtualLayout:
    """Devices of each role."""
    places: list[tuple[str, Role]] = []
    for role in (role for role in READING_ROLES if role in scorer_roles(spec)):
        process = machine.process_of(role)
        places += [(device, role) for device in (machine.own if process is None else process.devices)]
    scorers = tuple(dict.fromkeys(device for device, _ in places))
    speeds_up = devices.ranks is not None or devices.costs.decode.parallel
    decoding = len(machine.own) if speeds_up else 1  # a second device without speed-up stays idle
    idle = tuple(device for device in scorers if device not in machine.own)
    if spec.ppo.has_critic or devices.kind != "cpu" or devices.ranks is not None:
        idle = ()
    return VirtualLayout(
        devices.names, machine.own, scorers, decoding, machine.streams, idle_in_training=idle, places=tuple(places)
    )


def assemble(
    spec: RunSpec, devices: Devices, length: Length | None = None, prompts: PromptStream | None = None, out: Path = Path()
) -> Engine:
    """An engine that runs `spec` on virtual `devices`.

    Args:
        length: length of each answer; default: drawn from the devices' workload.
        prompts: default: prompts of the workload's length.
        out: folder of checkpoints, if the spec has any.

    Raises:
        DevicesError: update overlap without devices of the critic's own, or on data-parallel ranks.
    """
    shards = spec.training.shards_weights
    streams = spec.overlap.intra_step != "off" and bool(devices.groups) and (not shards or spec.models.reward.is_remote)
    pass_tokens = spec.ppo.micro_batch_tokens
    retained = pass_tokens * spec.training.retained_passes if spec.ppo.optimizer_steps == 1 else 0
    machine = Machine(devices, streams, pass_tokens, shards, retained)
    most = spec.rollout.max_new_tokens
    length = length or sample_lengths(spec.seed, devices.workload.lengths, most)
    layout = virtual_layout(spec, devices, machine)
    engine = VirtualEngine(
        spec=spec, layout=layout, codec=ByteCodec(VOCABULARY), prompts=prompts or _prompts(spec, devices, machine),
        pool=build_pool(spec),
        decoder=SimulatedDecoder(machine, length, most, spec.overlap.kv_after_update == "keep"),
        actor=SimulatedActor(machine, spec.ppo), scorers=_scorers(spec, machine), journal=MemoryJournal(machine), out=out,
        model_source=None, trace=machine.trace, progress=Progress(kl_coefficient=spec.ppo.kl.coefficient),
        overcommit=OvercommitState(spec.initial_overcommit), chunk=ChunkState(spec.initial_chunk_size),
        update=_update(spec, devices), clock=machine.timeline, set_threads=machine.use, experience=SimulatedExperience(machine),
        machine=machine,
    )  # fmt: skip
    return engine


def steps_of(engine: Engine) -> Iterator[dict[str, float]]:
    """Train without checkpoints; yields each step's metrics."""
    journal = engine.journal
    assert isinstance(journal, MemoryJournal)
    step_report.started(engine)
    window_start = engine.clock()
    while engine.progress.step < engine.spec.steps:
        window_start = train_step(engine, window_start)
        yield journal.steps[-1]


def _prompts(spec: RunSpec, devices: Devices, machine: Machine) -> PromptStream:
    tokens = min(devices.workload.prompt_tokens, spec.rollout.max_prompt_tokens)
    return PricedPrompts([np.zeros(tokens, dtype=np.int64)] * PROMPTS, spec.seed, spec.data.shuffle, machine)


def _scorers(spec: RunSpec, machine: Machine) -> SimulatedScorers:
    has_model = any(source.model is not None for source in spec.models.reward.sources())
    if spec.overlap.update_overlap:
        return SimulatedEarlyScorers(machine, spec.seed, has_model, spec.ppo)
    return SimulatedScorers(machine, spec.seed, has_model, spec.ppo, reads_critic_once(spec))


def _update(spec: RunSpec, devices: Devices) -> PlainUpdate:
    if not spec.ppo.has_critic:
        return CriticFreeUpdate()
    if not spec.overlap.update_overlap:
        return PlainUpdate()
    if devices.place["critic"] == ACTOR_GROUP:
        raise DevicesError("update overlap needs a critic with devices of its own")
    if devices.ranks is not None:
        raise DevicesError("update overlap is not simulated on data-parallel ranks")
    return OverlappedUpdate(no_gradients())

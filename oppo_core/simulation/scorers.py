"""Scorers on virtual devices: they count received and prefilled tokens, and submit work to their processes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from oppo_contract.events import Phase
from oppo_contract.spec import Ppo
from oppo_core.ppo.critic import CriticUpdate
from oppo_core.ppo.scored import Scored
from oppo_core.ppo.stepwise import Pause
from oppo_core.scoring.scorers import SequenceDelta
from oppo_core.simulation.lengths import SCORES, generator_for
from oppo_core.simulation.machine import Loads, Machine
from oppo_core.simulation.timeline import Process, Task
from oppo_estimate.devices import READING_ROLES, Curve, ReadingRole

PHASES: dict[ReadingRole, Phase] = {"reward": "reward-prefill", "reference": "reference-prefill", "critic": "critic-prefill"}


@dataclass(slots=True)
class Track:
    """State of a sequence; `versions`: sum of the policy versions of its response tokens."""

    prompt: int
    total: int = 0
    versions: int = 0
    finished: bool = False
    read: dict[ReadingRole, int] = field(default_factory=lambda: dict.fromkeys(READING_ROLES, 0))

    @property
    def response(self) -> int:
        """Response tokens."""
        return self.total - self.prompt


class SimulatedScorers:
    """A `ScorerProtocol`. Roles with devices of their own prefill deltas at once, the others when scores are collected."""

    saves_bytes = 0

    def __init__(self, machine: Machine, seed: int, has_reward_model: bool, ppo: Ppo, reads_once: bool = False) -> None:
        """`reads_once`: the critic reads whole answers of the batch in one pass, for values and update."""
        self.tracks: dict[int, Track] = {}
        self._machine = machine
        self._seed = seed
        self._curve: Curve = machine.devices.workload.scores
        self._epochs, self._optimizer_steps = ppo.epochs, ppo.epochs * ppo.mini_batches
        absent = {name for name, present in (("reward", has_reward_model), ("critic", ppo.has_critic)) if not present}
        self._has_critic, self._reads_once = ppo.has_critic, ppo.has_critic and reads_once
        streamed = [role for role in READING_ROLES if role != "critic" or not self._reads_once]
        self._roles = [role for role in streamed if role not in absent]
        self._process, self._costs = machine.process_of("critic"), machine.devices.costs.critic
        self._requested: list[int] = []
        self._collecting: list[Task] = []
        self._retained: list[int] | None = None  # tokens of the critic's forward pass, by rank
        self._evaluated: dict[int, float] = {}

    def begin(self, deltas: list[SequenceDelta]) -> None:
        for track in self.tracks.values():
            track.read["critic"] = 0
        self._take(deltas)
        self._read(list(self.tracks), chunk=0, late=False)

    def extend(self, deltas: list[SequenceDelta], chunk: int) -> None:
        overheads = self._machine.devices.overheads
        if self._machine.streams and deltas:
            self._machine.work(overheads.handover_us + len(deltas) * overheads.handover_row_us)
        self._take(deltas)
        self._read([delta.sequence_id for delta in deltas], chunk, late=not self._machine.streams)

    def start_collect(self, sequence_ids: list[int]) -> None:
        self._read(sequence_ids, 0, late=True)
        if self._reads_once:
            self._read_whole(sequence_ids)
        self._requested = sequence_ids
        score_us = len(sequence_ids) * self._machine.devices.overheads.score_us
        self._machine.submit(self._machine.process_of("reward"), "reward", "score", score_us, rows=len(sequence_ids))
        self._collecting = self._machine.timeline.submitted()

    def wait_collect(self) -> dict[int, Scored]:
        self._machine.timeline.wait(self._collecting)
        return {i: self._scored(i) for i in self._requested}

    def forward_critic(self, sequence_ids: list[int]) -> None:
        """The tokens whose graphs are retained; see `ScorerProtocol.forward_critic`."""
        if not self._has_critic or self._retained is not None:
            return
        retained = self._machine.retained(self._whole(sequence_ids), self._process)
        if not any(retained):
            return
        self._retained, loads = retained, [[tokens] for tokens in retained]
        us = self._machine.forward_us(self._costs, loads, self._process)
        self._machine.submit(self._process, "critic", "update-critic", us, rows=len(sequence_ids))

    def start_critic_update(self, update: CriticUpdate) -> None:
        self._train_critic(update.sequence_ids)
        self._forget(update.sequence_ids)

    def wait_critic_update(self) -> dict[str, float]:
        self._machine.timeline.wait()
        return {}

    def prepare_critic_update(self, update: CriticUpdate) -> None:
        """Simulated gradients are always finite."""
        self._train_critic(update.sequence_ids)

    def start_critic_step(self) -> None:
        pass

    def wait_critic_step(self) -> Pause:
        return Pause(metrics=self.wait_critic_update())

    def discard_critic_step(self) -> None:
        pass

    def limit(self, passes: dict[str, int]) -> None:
        """Simulated memory never runs out."""

    def release(self, sequence_ids: list[int]) -> None:
        self._forget(sequence_ids)

    def start_evaluate(self, deltas: list[SequenceDelta]) -> None:
        process = self._machine.process_of("reward")
        loads = self._machine.loads([len(delta.tokens) for delta in deltas], range(len(deltas)), process)
        us = self._machine.forward_us(self._machine.devices.costs.reward, loads, process)
        self._machine.submit(process, "reward", "eval", us, rows=len(deltas))
        tracks = {
            delta.sequence_id: Track(delta.prompt_length, len(delta.tokens), int(delta.tokens[delta.prompt_length :].sum()))
            for delta in deltas
        }
        self._evaluated = {sequence_id: self._score(sequence_id, track) for sequence_id, track in tracks.items()}

    def wait_evaluate(self) -> dict[int, float]:
        self._machine.timeline.wait()
        return self._evaluated

    def start_save(self, folder: str) -> None:
        if self._has_critic:
            us = self._machine.devices.overheads.checkpoint_us
            self._machine.submit(self._machine.process_of("critic"), "critic", "checkpoint", us)
        self._forget(list(self.tracks))

    def wait_save(self) -> None:
        self._machine.timeline.wait()

    def close(self) -> None:
        pass

    def _take(self, deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            track = self.tracks.get(delta.sequence_id)
            if track is None:
                track = self.tracks[delta.sequence_id] = Track(delta.prompt_length)
            response = delta.tokens[max(0, track.prompt - track.total) :]
            track.total += len(delta.tokens)
            track.versions += int(response.sum())
            track.finished = delta.finished

    def _read(self, sequence_ids: list[int], chunk: int, late: bool) -> None:
        """Every role prefills its new tokens; roles on the actor's devices only if `late`."""
        for role in self._roles:
            process = self._machine.process_of(role)
            if process is None and not late:
                continue
            unread = {i: track for i in sequence_ids if (track := self.tracks[i]).total > track.read[role]}
            if not unread:
                continue
            loads = self._loads(list(unread), [track.total - track.read[role] for track in unread.values()], process)
            for track in unread.values():
                track.read[role] = track.total
            costs = getattr(self._machine.devices.costs, role)
            us = self._machine.forward_us(costs, loads, process)
            self._machine.submit(process, role, PHASES[role], us, chunk, len(unread))

    def _loads(self, sequence_ids: list[int], lengths: list[int], process: Process | None) -> Loads:
        """`lengths` of some sequences by rank of a process."""
        return self._machine.loads(lengths, [self._machine.rank_of.get(i, 0) for i in sequence_ids], process)

    def _read_whole(self, sequence_ids: list[int]) -> None:
        """One pass of the critic over whole answers: values, and graphs for the update."""
        loads = self._whole(sequence_ids)
        self._retained = self._machine.retained(loads, self._process)
        us = self._machine.forward_us(self._costs, loads, self._process)
        self._machine.submit(self._process, "critic", "critic-prefill", us, rows=len(sequence_ids))

    def _train_critic(self, sequence_ids: list[int]) -> None:
        costs, loads = self._costs, self._whole(sequence_ids)
        retained = self._retained or [0] * len(loads)
        epoch_us = self._machine.update_us(costs, loads, retained, self._process)
        step_us = costs.optimizer_us + self._machine.reduce_us(costs, self._process)
        us = self._epochs * epoch_us + self._optimizer_steps * step_us
        self._machine.submit(self._process, "critic", "update-critic", us, rows=len(sequence_ids))

    def _whole(self, sequence_ids: list[int]) -> Loads:
        """Whole sequences by rank of the critic's process."""
        return self._loads(sequence_ids, [self.tracks[i].total for i in sequence_ids], self._process)

    def _scored(self, sequence_id: int) -> Scored:
        track = self.tracks[sequence_id]
        zeros = np.broadcast_to(np.float64(0), track.response)
        return Scored(self._score(sequence_id, track), zeros, zeros)

    def _score(self, sequence_id: int, track: Track) -> float:
        curve = self._curve
        version = track.versions / max(1, track.response)
        learned = curve.first + (curve.last - curve.first) * -math.expm1(-version / curve.steps)
        return learned + curve.noise * float(generator_for(self._seed, SCORES, sequence_id).standard_normal())

    def _forget(self, sequence_ids: list[int]) -> None:
        self._retained = None
        for sequence_id in sequence_ids:
            del self.tracks[sequence_id]

"""The scorers on virtual devices: they count what they have been told and have read, and order work from their processes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from oppo_contract.events import Phase
from oppo_contract.spec import Ppo
from oppo_core.ppo.critic import CriticUpdate
from oppo_core.ppo.stepwise import Pause
from oppo_core.scoring.results import Scored
from oppo_core.scoring.scorers import SequenceDelta
from oppo_core.simulation.lengths import SCORES, numbers
from oppo_core.simulation.machine import Machine
from oppo_estimate.devices import READING_ROLES, Curve, ReadingRole, Training

PHASES: dict[ReadingRole, Phase] = {"reward": "reward-prefill", "reference": "reference-prefill", "critic": "critic-prefill"}


@dataclass(slots=True)
class Track:
    """A sequence as the scorers know it; `versions`: sum over the response tokens of the policy version of each."""

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
    """A `ScorerProtocol`. Roles on their own devices read deltas at once, those on the actor's when scores are collected."""

    streamed: tuple[ReadingRole, ...] = READING_ROLES
    saves_bytes = 0

    def __init__(self, machine: Machine, seed: int, has_reward_model: bool, ppo: Ppo) -> None:
        self.tracks: dict[int, Track] = {}
        self._machine = machine
        self._seed = seed
        self._curve: Curve = machine.devices.workload.scores
        self._passes, self._optimizer_steps = ppo.epochs, ppo.epochs * ppo.mini_batches
        left_out = {name for name, there in (("reward", has_reward_model), ("critic", ppo.has_critic)) if not there}
        self._has_critic = ppo.has_critic
        self._roles = [role for role in self.streamed if role not in left_out]
        self._asked: list[int] = []
        self._judged: dict[int, float] = {}

    def begin(self, deltas: list[SequenceDelta]) -> None:
        """See `ScorerProtocol.begin`."""
        for track in self.tracks.values():
            track.read["critic"] = 0
        self._take(deltas)
        self._read(list(self.tracks), chunk=0, late=False)

    def extend(self, deltas: list[SequenceDelta], chunk: int) -> None:
        """See `ScorerProtocol.extend`."""
        overheads = self._machine.devices.overheads
        if self._machine.streams and deltas:
            self._machine.work(overheads.handover_us + len(deltas) * overheads.handover_row_us)
        self._take(deltas)
        self._read([delta.sequence_id for delta in deltas], chunk, late=not self._machine.streams)

    def start_collect(self, sequence_ids: list[int]) -> None:
        """See `ScorerProtocol.start_collect`."""
        self._read(sequence_ids, 0, late=True)
        self._asked = sequence_ids
        score_us = len(sequence_ids) * self._machine.devices.overheads.score_us
        self._machine.order(self._machine.beside("reward"), "reward", "score", score_us, rows=len(sequence_ids))

    def wait_collect(self) -> dict[int, Scored]:
        """See `ScorerProtocol.wait_collect`."""
        self._machine.timeline.wait()
        return {i: self._scored(i) for i in self._asked}

    def start_critic_update(self, update: CriticUpdate) -> None:
        """See `ScorerProtocol.start_critic_update`."""
        self._train_critic(update.sequence_ids, self._passes, self._optimizer_steps)
        self._forget(update.sequence_ids)

    def wait_critic_update(self) -> dict[str, float]:
        """See `ScorerProtocol.wait_critic_update`."""
        self._machine.timeline.wait()
        return {}

    def prepare_critic_update(self, update: CriticUpdate) -> None:
        """See `ScorerProtocol.prepare_critic_update`: here nothing is ever not finite, so there is nothing to decide."""
        self._train_critic(update.sequence_ids, self._passes, self._optimizer_steps)

    def start_critic_step(self) -> None:
        """See `ScorerProtocol.start_critic_step`."""

    def wait_critic_step(self) -> Pause:
        """See `ScorerProtocol.wait_critic_step`."""
        return Pause(metrics=self.wait_critic_update())

    def discard_critic_step(self) -> None:
        """See `ScorerProtocol.discard_critic_step`."""

    def limit(self, passes: dict[str, int]) -> None:
        """See `ScorerProtocol.limit`: memory never runs out."""

    def release(self, sequence_ids: list[int]) -> None:
        """See `ScorerProtocol.release`."""
        self._forget(sequence_ids)

    def start_evaluate(self, deltas: list[SequenceDelta]) -> None:
        """See `ScorerProtocol.start_evaluate`."""
        process = self._machine.beside("reward")
        us = self._machine.forward_us(self._machine.devices.costs.reward, [len(delta.tokens) for delta in deltas], process)
        self._machine.order(process, "reward", "eval", us, rows=len(deltas))
        tracks = {g.sequence_id: Track(g.prompt_length, len(g.tokens), int(g.tokens[g.prompt_length :].sum())) for g in deltas}
        self._judged = {sequence_id: self._score(sequence_id, track) for sequence_id, track in tracks.items()}

    def wait_evaluate(self) -> dict[int, float]:
        """See `ScorerProtocol.wait_evaluate`."""
        self._machine.timeline.wait()
        return self._judged

    def start_save(self, folder: str) -> None:
        """See `ScorerProtocol.start_save`."""
        if self._has_critic:
            us = self._machine.devices.overheads.checkpoint_us
            self._machine.order(self._machine.beside("critic"), "critic", "checkpoint", us)
        self._forget(list(self.tracks))

    def wait_save(self) -> None:
        """See `ScorerProtocol.wait_save`."""
        self._machine.timeline.wait()

    def close(self) -> None:
        """Nothing to end."""

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
        """All roles read what is new to them; those on the actor's devices only when it is `late`."""
        for role in self._roles:
            process = self._machine.beside(role)
            if process is None and not late:
                continue
            tracks = [self.tracks[i] for i in sequence_ids]
            new = [track.total - track.read[role] for track in tracks if track.total > track.read[role]]
            if not new:
                continue
            for track in tracks:
                track.read[role] = track.total
            costs = getattr(self._machine.devices.costs, role)
            us = self._machine.forward_us(costs, new, process)
            self._machine.order(process, role, PHASES[role], us, chunk, len(new))

    def _train_critic(self, sequence_ids: list[int], passes: int, optimizer_steps: int) -> None:
        costs: Training = self._machine.devices.costs.critic
        process = self._machine.beside("critic")
        lengths = [self.tracks[i].total for i in sequence_ids]
        each = self._machine.forward_us(costs, lengths, process) + self._machine.backward_us(costs, lengths, process)
        us = passes * each + optimizer_steps * costs.optimizer_us
        self._machine.order(process, "critic", "update-critic", us, rows=len(lengths))

    def _scored(self, sequence_id: int) -> Scored:
        track = self.tracks[sequence_id]
        nothing = np.broadcast_to(np.float64(0), track.response)
        return Scored(self._score(sequence_id, track), nothing, nothing)

    def _score(self, sequence_id: int, track: Track) -> float:
        curve = self._curve
        version = track.versions / max(1, track.response)
        learned = curve.first + (curve.last - curve.first) * -math.expm1(-version / curve.steps)
        return learned + curve.noise * float(numbers(self._seed, SCORES, sequence_id).standard_normal())

    def _forget(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            del self.tracks[sequence_id]

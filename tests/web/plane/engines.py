"""Simulated engines: they load, step, save and end as `python -m oppo_core` does, seen from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from oppo_contract.events import CheckpointEvent, Event, FinishedEvent, LogEvent, StartedEvent, StepEvent
from oppo_contract.wire import Claimed
from tests.web.plane.meetings import Meeting
from tests.web.plane.network import Agenda
from worker.folders import EngineEnd, SavedClaim
from worker.outcomes import RANK_ERROR
from worker.rendezvous import TORCHRUN_MARGIN_S

KILLED = 137
# What engines say when they die, and the exit status that comes with it.
LAST_WORDS = {
    "CUDA out of memory": 1,
    "uncorrectable ECC error": 1,
    "segmentation fault": 139,
    "the spec is refused": 2,
    "": KILLED,
}


@dataclass
class Files:
    """An attempt's folder on a node's disk: what survives the death of every process."""

    claim: SavedClaim | None = None
    end: EngineEnd | None = None
    session: bool = False
    engine: list[Event] = field(default_factory=list)
    supervisor: list[Event] = field(default_factory=list)

    def note(self, text: str, time: float) -> None:
        """A line of the supervisor's outbox."""
        seq = len(self.supervisor) + 1
        self.supervisor.append(LogEvent(producer="supervisor", seq=seq, time=time, stream="stderr", lines=[text]))

    def last_lines(self) -> list[str]:
        """The end of the log."""
        return [line for event in self.supervisor if isinstance(event, LogEvent) for line in event.lines][-5:]


class Engine:
    """One engine's process, on devices of one node. `on_end` is its supervisor's ear; `meeting` is where it finds the others."""

    def __init__(
        self,
        agenda: Agenda,
        rng: Random,
        files: Files,
        claimed: Claimed,
        hurry: Callable[[], bool],
        meeting: Meeting | None = None,
    ) -> None:
        self.agenda, self.rng, self.files, self.claimed, self.hurry = agenda, rng, files, claimed, hurry
        self.meeting = meeting
        self.rank = claimed.rendezvous.node_rank if claimed.rendezvous else 0
        self.attempt_id = 0
        self.devices = tuple(claimed.device_indices)
        self.alive = True
        self.exit_code = 0
        self.deaf = rng.random() < 0.06  # hangs when it is asked to stop
        self.stopping = False
        self.step = claimed.resume_from.step if claimed.resume_from else 0
        self.total = int(_number(claimed.spec["steps"]))
        self.pace_s = rng.uniform(0.5, 4.0)
        self.on_end: Callable[[], None] = lambda: None
        agenda.after(rng.uniform(0.2, 3.0), self._loaded)

    def ask_to_stop(self) -> None:
        """SIGTERM: finish the chunk, write a checkpoint, leave."""
        if not self.alive or self.stopping or self.deaf:
            return
        if self.meeting is not None and self.meeting.met:
            self.meeting.stop()
            return
        self.stopping = True
        self.agenda.after(self.rng.uniform(0.0, 3.0), self.leave_stopped if self.meeting is None else self._give_up)

    def kill(self) -> None:
        """SIGKILL to every process of it."""
        self._end(KILLED)

    def lose_lifeline(self) -> None:
        """Its supervisor is gone: it may save within its grace, then it is killed. Below torchrun it has none."""
        if self.meeting is None:
            self.ask_to_stop()
        self.on_end = lambda: None
        self.agenda.after(self.rng.uniform(0.0, 3.0), self.kill)

    def die(self, words: str) -> None:
        """Something goes wrong inside."""
        if self.alive:
            self.files.note(words or "killed", self.agenda.now)
            self._end(LAST_WORDS[words])

    def begin(self) -> None:
        """All are loaded. The head steps, and tells of it."""
        devices = [f"node{self.rank}/cuda:{index}" if self.rank else f"cuda:{index}" for index in self.devices]
        self._tell(StartedEvent, devices=devices, lanes=[(devices[0], "actor")], start_step=self.step, total_steps=self.total)
        if self.rank == 0:
            self.agenda.after(self._pace(), self._next_step)

    def leave_stopped(self) -> None:
        """It was asked to, or another rank was."""
        if self.alive:
            self._leave("stopped")

    def leave_done(self) -> None:
        """Every step is trained."""
        if self.alive:
            self._leave("succeeded")

    def lose_others(self) -> None:
        """Another rank has ended or is silent."""
        if self.alive:
            self.files.note("lost sight of another rank", self.agenda.now)
            self._tell(FinishedEvent, outcome="failed", step=self.step, reason=f"{RANK_ERROR} rank {self.rank} lost another rank")
            self._end(1)

    def _loaded(self) -> None:
        if not self.alive or self.stopping:
            return
        if self.meeting is None:
            self.begin()
            return
        assert self.claimed.rendezvous is not None
        self.meeting.join(self)
        self.agenda.after(self.claimed.rendezvous.deadline_s + TORCHRUN_MARGIN_S, self._give_up)

    def _give_up(self) -> None:
        """torchrun waits no longer, or not at all when it is asked to stop before all are there."""
        if self.alive and self.meeting is not None and not self.meeting.met:
            self.files.note("the rendezvous timed out", self.agenda.now)
            self._end(1)

    def _next_step(self) -> None:
        if not self.alive or self.stopping:
            return
        self.step += 1
        told = {"elapsed_s": self.step * self.pace_s, "generated_tokens": 10 * self.step, "device_seconds": self.step * 1.0}
        self._tell(StepEvent, step=self.step, metrics={"reward": float(self.step)}, **told)
        if self.step >= self.total:
            if self.meeting is None:
                self._leave("succeeded")
            else:
                self.meeting.all_done()
            return
        if self.step % 2 == 0:
            self._save()
        self.agenda.after(self._pace(), self._next_step)

    def _leave(self, outcome: str) -> None:
        if self.rank == 0:
            self._save()
        self._tell(
            FinishedEvent, outcome=outcome, step=self.step, reason="all steps are done" if outcome == "succeeded" else "asked"
        )
        self._end(0)

    def _save(self) -> None:
        folder = f"checkpoints/step-{self.step:08d}-{self.claimed.run_id}"
        self._tell(CheckpointEvent, step=self.step, folder=folder, manifest_sha256="0" * 64, bytes=1)

    def _end(self, code: int) -> None:
        if self.alive:
            self.alive, self.exit_code = False, code
            if self.meeting is not None and code != 0:
                self.meeting.lost(self)
            self.on_end()

    def _pace(self) -> float:
        return 0.2 if self.hurry() else self.pace_s

    def _tell(self, kind: type[Any], **facts: Any) -> None:
        self.files.engine.append(kind(producer="engine", seq=len(self.files.engine) + 1, time=self.agenda.now, **facts))


def _number(value: object) -> float:
    assert isinstance(value, (int, float))
    return value

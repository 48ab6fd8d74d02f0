"""Scorers that work elsewhere take orders: each is sent on at once, and answered later where an answer is due."""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

from oppo_core.ppo.critic import CriticUpdate
from oppo_core.ppo.stepwise import Pause
from oppo_core.scoring.results import Scored
from oppo_core.scoring.scorers import Growth, Scoring
from oppo_core.trace.recorder import Recorder


class OrderedScorers(Scoring):
    """A `Scoring` that turns every call into an order by the name of a method of `ScorerSet`.

    Every `wait_…` raises ScorerError when the scorers failed, ended, or fell silent.
    """

    _trace: Recorder

    @abstractmethod
    def _send(self, name: str, *arguments: object) -> None:
        """Have `name` done after everything that was sent before; returns once there is room in the queue."""

    @abstractmethod
    def _receive(self) -> object:
        """The answer to the oldest `start_…` that was not answered yet, its spans put to ours."""

    def begin(self, growths: list[Growth]) -> None:
        """See `Scoring.begin`; returns at once."""
        self._send("begin", growths)

    def extend(self, growths: list[Growth], chunk: int) -> None:
        """See `Scoring.extend`; returns at once."""
        self._send("extend", growths, chunk)

    def start_collect(self, sequence_ids: list[int]) -> None:
        """See `Scoring.start_collect`."""
        with self._trace.span("actor", "score", rows=len(sequence_ids)):
            self._send("start_collect", sequence_ids)

    def start_critic_update(self, update: CriticUpdate) -> None:
        """See `Scoring.start_critic_update`."""
        with self._trace.span("actor", "advantages", rows=len(update.sequence_ids)):
            self._send("start_critic_update", update)

    def prepare_critic_update(self, update: CriticUpdate) -> None:
        """See `Scoring.prepare_critic_update`; returns at once."""
        with self._trace.span("actor", "advantages", rows=len(update.sequence_ids)):
            self._send("prepare_critic_update", update)

    def start_critic_step(self) -> None:
        """See `Scoring.start_critic_step`."""
        self._send("start_critic_step")

    def wait_critic_step(self) -> Pause:
        """See `Scoring.wait_critic_step`."""
        return cast(Pause, self._receive())

    def discard_critic_step(self) -> None:
        """See `Scoring.discard_critic_step`; returns at once."""
        self._send("discard_critic_step")

    def release(self, sequence_ids: list[int]) -> None:
        """See `Scoring.release`; returns at once."""
        if sequence_ids:
            self._send("release", sequence_ids)

    def limit(self, passes: dict[str, int]) -> None:
        """See `Scoring.limit`; returns at once."""
        self._send("limit", passes)

    def start_judge(self, growths: list[Growth]) -> None:
        """See `Scoring.start_judge`."""
        self._send("start_judge", growths)

    def wait_judge(self) -> dict[int, float]:
        """See `Scoring.wait_judge`."""
        return cast(dict[int, float], self._receive())

    def start_save(self, folder: str) -> None:
        """See `Scoring.start_save`."""
        self._send("start_save", folder)

    def wait_collect(self) -> dict[int, Scored]:
        """See `Scoring.wait_collect`."""
        return cast(dict[int, Scored], self._receive())

    def wait_critic_update(self) -> dict[str, float]:
        """See `Scoring.wait_critic_update`."""
        return cast(dict[str, float], self._receive())

    def wait_save(self) -> None:
        """See `Scoring.wait_save`."""
        self._receive()

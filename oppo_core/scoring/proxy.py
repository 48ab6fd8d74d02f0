"""Base of scorer proxies: calls are queued for a thread or process; `wait_…` methods block for the reply."""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

from oppo_core.ppo.critic import CriticUpdate
from oppo_core.ppo.scored import Scored
from oppo_core.ppo.stepwise import Pause
from oppo_core.scoring.scorers import ScorerProtocol, SequenceDelta
from oppo_core.trace.recorder import Recorder


class ScorerProxy(ScorerProtocol):
    """A `ScorerProtocol` that forwards every call, by method name, to a `ScorerSet` elsewhere. Calls return at once.

    Every `wait_…` raises ScorerError when the scorers failed, exited, or hang.
    """

    _trace: Recorder

    @abstractmethod
    def _send(self, name: str, *arguments: object) -> None:
        """Queue a call of method `name` behind earlier calls; blocks while the queue is full."""

    @abstractmethod
    def _receive(self) -> object:
        """The reply to the oldest unanswered `start_…`; its trace spans are merged into this process's trace."""

    def begin(self, deltas: list[SequenceDelta]) -> None:
        self._send("begin", deltas)

    def extend(self, deltas: list[SequenceDelta], chunk: int) -> None:
        self._send("extend", deltas, chunk)

    def start_collect(self, sequence_ids: list[int]) -> None:
        with self._trace.span("actor", "score", rows=len(sequence_ids)):
            self._send("start_collect", sequence_ids)

    def forward_critic(self, sequence_ids: list[int]) -> None:
        self._send("forward_critic", sequence_ids)

    def start_critic_update(self, update: CriticUpdate) -> None:
        with self._trace.span("actor", "advantages", rows=len(update.sequence_ids)):
            self._send("start_critic_update", update)

    def prepare_critic_update(self, update: CriticUpdate) -> None:
        with self._trace.span("actor", "advantages", rows=len(update.sequence_ids)):
            self._send("prepare_critic_update", update)

    def start_critic_step(self) -> None:
        self._send("start_critic_step")

    def wait_critic_step(self) -> Pause:
        return cast(Pause, self._receive())

    def discard_critic_step(self) -> None:
        self._send("discard_critic_step")

    def release(self, sequence_ids: list[int]) -> None:
        if sequence_ids:
            self._send("release", sequence_ids)

    def limit(self, passes: dict[str, int]) -> None:
        self._send("limit", passes)

    def start_evaluate(self, deltas: list[SequenceDelta]) -> None:
        self._send("start_evaluate", deltas)

    def wait_evaluate(self) -> dict[int, float]:
        return cast(dict[int, float], self._receive())

    def start_save(self, folder: str) -> None:
        self._send("start_save", folder)

    def wait_collect(self) -> dict[int, Scored]:
        return cast(dict[int, Scored], self._receive())

    def wait_critic_update(self) -> dict[str, float]:
        return cast(dict[str, float], self._receive())

    def wait_save(self) -> None:
        self._receive()

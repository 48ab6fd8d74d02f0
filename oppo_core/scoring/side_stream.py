"""The scorers on a GPU that they share with the actor: their work is queued on a stream of its own and fills decoding's gaps.

One thread queues for both sides; kernels run when the device has room. What the scorers read comes from the host, so the two
streams never wait for each other. Only asking for a result waits, and only for the scorers' stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from oppo_core.ppo.critic import CriticUpdate
from oppo_core.ppo.trial import Trial
from oppo_core.scoring.results import Scored
from oppo_core.scoring.scorers import Growth, ScorerSet, Scoring


class SideStreamScorers(Scoring):
    """A `Scoring` that queues the work of `scorers`; on a CPU, which has no streams, it does it on the spot."""

    def __init__(self, scorers: ScorerSet, device: torch.device) -> None:
        self.scorers = scorers
        self.saves_bytes = scorers.saves_bytes
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))  # the weights are copied there

    def begin(self, growths: list[Growth]) -> None:
        """See `Scoring.begin`."""
        with self._aside():
            self.scorers.begin(growths)

    def extend(self, growths: list[Growth], chunk: int) -> None:
        """See `Scoring.extend`."""
        with self._aside():
            self.scorers.extend(growths, chunk)

    def start_collect(self, sequence_ids: list[int]) -> None:
        """See `Scoring.start_collect`."""
        with self._aside():
            self.scorers.start_collect(sequence_ids)

    def wait_collect(self) -> dict[int, Scored]:
        """See `Scoring.wait_collect`."""
        return self.scorers.wait_collect()

    def start_critic_update(self, update: CriticUpdate) -> None:
        """See `Scoring.start_critic_update`."""
        with self._aside():
            self.scorers.start_critic_update(update)

    def wait_critic_update(self) -> dict[str, float]:
        """See `Scoring.wait_critic_update`."""
        return self.scorers.wait_critic_update()

    def start_trial(self, update: CriticUpdate) -> None:
        """See `Scoring.start_trial`."""
        with self._aside():
            self.scorers.start_trial(update)

    def wait_trial(self) -> Trial:
        """See `Scoring.wait_trial`."""
        return self.scorers.wait_trial()

    def settle(self, keep: bool) -> None:
        """See `Scoring.settle`."""
        with self._aside():
            self.scorers.settle(keep)

    def start_load(self, folder: str) -> None:
        """See `Scoring.start_load`."""
        with self._aside():
            self.scorers.start_load(folder)

    def wait_load(self) -> None:
        """See `Scoring.wait_load`."""
        self.scorers.wait_load()

    def release(self, sequence_ids: list[int]) -> None:
        """See `Scoring.release`."""
        with self._aside():
            self.scorers.release(sequence_ids)

    def start_judge(self, growths: list[Growth]) -> None:
        """See `Scoring.start_judge`."""
        with self._aside():
            self.scorers.start_judge(growths)

    def wait_judge(self) -> dict[int, float]:
        """See `Scoring.wait_judge`."""
        return self.scorers.wait_judge()

    def start_save(self, folder: str) -> None:
        """See `Scoring.start_save`."""
        with self._aside():
            self.scorers.start_save(folder)

    def start_suspend(self, folder: str) -> None:
        """See `Scoring.start_suspend`."""
        with self._aside():
            self.scorers.start_suspend(folder)

    def wait_suspend(self) -> None:
        """See `Scoring.wait_suspend`."""
        self.scorers.wait_suspend()

    def resume(self, folder: str) -> None:
        """See `Scoring.resume`."""
        with self._aside():
            self.scorers.resume(folder)

    def wait_save(self) -> None:
        """See `Scoring.wait_save`."""
        self.scorers.wait_save()

    def close(self) -> None:
        """See `Scoring.close`."""
        self.scorers.close()

    def _aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

"""How many tokens a pass of training may have, and what happens when memory does not suffice for them.

How rows are cut into passes changes rounding and nothing else, so what does not fit is computed again in smaller ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

LEAST_TOKENS = 16  # as in the spec; a row stands alone well before
LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


class MemoryShortError(RuntimeError):
    """Training does not fit into memory, not even row by row."""


@dataclass(slots=True)
class PassBudget:
    """Most padded tokens of one pass: `ppo.micro_batch_tokens`, until memory has run out.

    It `may_shrink` only where nobody else counts on the number of passes: other ranks do.
    """

    tokens: int
    may_shrink: bool

    def shrinking(self, what: str, compute: Callable[[], Result]) -> Result:
        """`compute()`; when memory runs out, once more with half the budget, which the log tells, and so on.

        `compute` reads `tokens` anew each time, and leaves nothing behind when it raises.

        Raises:
            MemoryShortError: not even the least budget fits.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                if not self.may_shrink:
                    raise
                self._halve(what, error)
            # Here, because until now the error has held on to all tensors of the frames that it came through.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _halve(self, what: str, error: torch.OutOfMemoryError) -> None:
        if self.tokens <= LEAST_TOKENS:
            raise MemoryShortError(
                f"{what} does not fit into memory, not even row by row: {error}. Lower rollout.max_new_tokens,"
                " ppo.batch_size or overlap.overcommit.max, or train models.lora"
            ) from None
        before, self.tokens = self.tokens, max(LEAST_TOKENS, self.tokens // 2)
        LOG.warning(
            "%s ran out of memory; it goes on with %d tokens a pass instead of %d (ppo.micro_batch_tokens): %s",
            what, self.tokens, before, error,
        )  # fmt: skip

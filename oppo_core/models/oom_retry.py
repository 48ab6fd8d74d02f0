"""Token budgets of passes, and out-of-memory (OOM) retries with smaller passes.

The split of rows into passes affects only rounding, so a pass that does not fit is retried with half the budget. Each rank splits
its own rows; other ranks are unaffected unless passes contain collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from oppo_core.models.cuda_graphs import CAPTURE

MAX_REASON_CHARS = 300  # of torch's message in a decision's reason
MIN_TOKENS = 16  # as in the spec; well below this every pass has one row
SHARDED = (
    "With training.backend deepspeed or fsdp2 every rank counts on the others' passes, so none makes its own smaller; lower"
    " ppo.micro_batch_tokens"
)
LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


class MemoryShortError(RuntimeError):
    """A pass does not fit into memory even with one row, or must not shrink because of other ranks."""


class Shrunk(NamedTuple):
    """An OOM retry: the budget of the passes called `passes` was reduced from `old` to `new` padded tokens."""

    passes: str
    old: int
    new: int
    reason: str


def no_op(_: Shrunk) -> None:
    """Default `on_shrink` callback."""


def no_heartbeat() -> None:
    """Default `alive` callback."""


@dataclass(slots=True)
class PassBudget:
    """Maximum padded tokens per pass for the passes called `name`: `ppo.micro_batch_tokens`, halved after each OOM.

    `may_shrink` is false under sharded training, where every rank must run the same number of passes. `on_shrink` is called
    with each reduction; `alive` before each pass, as a heartbeat.
    """

    tokens: int
    may_shrink: bool = True
    name: str = ""
    on_shrink: Callable[[Shrunk], None] = field(default=no_op, repr=False)
    alive: Callable[[], None] = field(default=no_heartbeat, repr=False)

    def run(self, what: str, compute: Callable[[], Result]) -> Result:
        """Return `compute()`; on OOM, halve the budget, log it and retry.

        `compute` must read `tokens` on every call and be safe to call again after an error.

        Raises:
            MemoryShortError: the minimum budget does not fit, or the budget may not shrink.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                if not self.may_shrink:
                    raise MemoryShortError(f"{what} ran out of memory: {error}. {SHARDED}") from None
                self._halve(what, error)
            # Only here: until the `except` block ends, the traceback keeps the tensors of its frames alive.
            if torch.cuda.is_available():
                with CAPTURE:
                    torch.cuda.empty_cache()

    def _halve(self, what: str, error: torch.OutOfMemoryError) -> None:
        if self.tokens <= MIN_TOKENS:
            raise MemoryShortError(
                f"{what} does not fit into memory, not even row by row: {error}. Lower rollout.max_new_tokens,"
                " ppo.batch_size or overlap.overcommit.max, or train models.lora"
            ) from None
        before, self.tokens = self.tokens, max(MIN_TOKENS, self.tokens // 2)
        self.on_shrink(Shrunk(self.name, before, self.tokens, f"{what} ran out of memory: {str(error)[:MAX_REASON_CHARS]}"))
        # Avoid torch's OOM wording: a retry rule could match this handled OOM when the run later fails for another reason.
        LOG.warning(
            "%s took more than the GPU has; continuing with %d tokens per pass instead of %d (ppo.micro_batch_tokens)",
            what, self.tokens, before,
        )  # fmt: skip


def limit(budgets: Iterable[PassBudget], passes: dict[str, int]) -> None:
    """Lower each budget to the value in `passes` for its name, if any."""
    for budget in budgets:
        budget.tokens = min(budget.tokens, passes.get(budget.name, budget.tokens))

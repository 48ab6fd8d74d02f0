"""How many tokens a pass may have, and what happens when memory does not suffice for them.

How rows are cut into passes changes rounding and nothing else, so what does not fit is computed again in smaller ones. Each rank
cuts its own rows: the others need not know, where nothing within a pass waits for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from oppo_core.trace.recorder import Shrunk

WORDS = 300  # characters of what torch says that go into a decision's reason
LEAST_TOKENS = 16  # as in the spec; a row stands alone well before
SHARDED = (
    "With training.backend deepspeed or fsdp2 every rank counts on the others' passes, so none makes its own smaller; lower"
    " ppo.micro_batch_tokens"
)
LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


class MemoryShortError(RuntimeError):
    """A pass does not fit into memory, not even row by row, or its size is what other ranks count on."""


def nobody(_: Shrunk) -> None:
    """Nobody asks to be told."""


def nobody_waits() -> None:
    """Nobody takes silence for death."""


@dataclass(slots=True)
class PassBudget:
    """Most padded tokens of one pass of those that go by `name`: `ppo.micro_batch_tokens`, until memory has run out.

    It `may_shrink` only where nobody else counts on the number of passes: the ranks of sharded training do. `told` hears of it.
    `alive` is called before each pass, as many of them take long.
    """

    tokens: int
    may_shrink: bool = True
    name: str = ""
    told: Callable[[Shrunk], None] = field(default=nobody, repr=False)
    alive: Callable[[], None] = field(default=nobody_waits, repr=False)

    def shrinking(self, what: str, compute: Callable[[], Result]) -> Result:
        """`compute()`; when memory runs out, once more with half the budget, which the log tells, and so on.

        `compute` reads `tokens` anew each time; when it raises it leaves nothing behind, or what it need not do again.

        Raises:
            MemoryShortError: not even the least budget fits, or this one may not shrink.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                if not self.may_shrink:
                    raise MemoryShortError(f"{what} ran out of memory: {error}. {SHARDED}") from None
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
        self.told(Shrunk(self.name, before, self.tokens, f"{what} ran out of memory: {str(error)[:WORDS]}"))
        # In words on which no rule of `retries` looks: a later death has other reasons. torch's own stand in the decision.
        LOG.warning(
            "%s took more than the GPU has; it goes on with %d tokens a pass instead of %d (ppo.micro_batch_tokens)",
            what, self.tokens, before,
        )  # fmt: skip


def limit(budgets: Iterable[PassBudget], passes: dict[str, int]) -> None:
    """None of `budgets` is larger from now on than `passes` says of its name."""
    for budget in budgets:
        budget.tokens = min(budget.tokens, passes.get(budget.name, budget.tokens))

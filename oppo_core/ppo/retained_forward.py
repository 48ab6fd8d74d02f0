"""A forward pass whose autograd graph is retained until its backward pass.

With one optimizer step per batch, the update's forward pass also yields the proximal log-probs or step-start values, so one pass
serves both. Graphs are retained up to a number of tokens; passes beyond it are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from oppo_core.models.microbatching import CPU_COSTS, PassCosts, packed_batches, ragged_batches

Outputs = tuple[Tensor, ...]


def unannounced(_: int) -> AbstractContextManager[None]:
    """Default `reads`: no other rank needs to know of a pass."""
    return nullcontext()


class RetainedForward:
    """Groups ragged rows into passes of `compute(rows)`, which returns tensors [M] for the M response tokens of the rows.

    Passes within `kept` tokens are computed at once with their graph. For the others, `first` computes only the first output,
    without a graph, and `groups` computes all outputs.
    """

    def __init__(
        self,
        compute: Callable[[list[int]], Outputs],
        lengths: Rows[int],
        sizes: Rows[int],
        budget: int,
        kept: int,
        costs: PassCosts = CPU_COSTS,
        packs: bool = False,
        reads: Callable[[int], AbstractContextManager[None]] = unannounced,
    ) -> None:
        """`lengths`: tokens per row, prompt included; `sizes`: response tokens per row; `budget`: maximum tokens per pass.

        Padding counts towards budgets, except with `packs`, which has none. `reads(n)`: a context manager around n passes
        without gradients (`TrainingBackend.reads`).
        """
        self._compute, self._reads = compute, reads
        self._sizes = sizes
        self._groups: list[tuple[list[int], Outputs | None]] = []
        retained = 0
        for rows in packed_batches(lengths, budget) if packs else ragged_batches(lengths, budget, None, costs):
            retained += sum(lengths[row] for row in rows) if packs else len(rows) * max(lengths[row] for row in rows)
            self._groups.append((rows, compute(rows) if retained <= kept else None))

    @property
    def passes(self) -> int:
        """Number of groups that `groups` has not yielded yet."""
        return len(self._groups)

    def release(self) -> None:
        """Drop all graphs."""
        self._groups.clear()

    @property
    def first(self) -> list[Tensor]:
        """The first output, detached, one tensor per row. Collective where passes are."""
        result: list[Tensor] = [torch.empty(0)] * len(self._sizes)
        with self._reads(sum(outputs is None for _, outputs in self._groups)):
            parts = [self._first_output(rows, outputs) for rows, outputs in self._groups]
        if not parts:
            return result
        order = [row for rows, _ in self._groups for row in rows]
        whole = torch.cat(parts).cpu()
        for row, part in zip(order, torch.split(whole, [self._sizes[row] for row in order]), strict=True):
            result[row] = part
        return result

    @torch.no_grad()
    def _first_output(self, rows: list[int], outputs: Outputs | None) -> Tensor:
        return (self._compute(rows) if outputs is None else outputs)[0].detach()

    def groups(self) -> Iterator[tuple[list[int], Outputs]]:
        """Yield rows and outputs with a graph, group by group; each group is released when the next one is requested."""
        while self._groups:
            rows, outputs = self._groups.pop(0)
            yield rows, outputs if outputs is not None else self._compute(rows)

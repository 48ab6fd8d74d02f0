"""A forward pass whose graph is kept until its backward pass is due.

With one optimizer step a batch the update's forward pass computes what the step needs anyway (proximal log-probs, step-start
values), so one pass serves both. Graphs are kept up to a number of tokens; what is beyond is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from oppo_core.ppo.microbatching import ON_A_CPU, PassCosts, packed_batches, ragged_batches

Outputs = tuple[Tensor, ...]


class HeldForward:
    """Groups ragged rows into passes of `compute(rows)`, which returns tensors [M]: M response tokens, row after row.

    What fits into `kept` tokens is computed at once with its graph; for the rest the first output alone is computed,
    when `first` is asked for before `groups`.
    """

    def __init__(
        self,
        compute: Callable[[list[int]], Outputs],
        lengths: Rows[int],
        sizes: Rows[int],
        budget: int,
        kept: int,
        costs: PassCosts = ON_A_CPU,
        packs: bool = False,
    ) -> None:
        """`lengths`: tokens a row, prompt included; `sizes`: response tokens a row; `budget`: most tokens a pass.

        Padding counts, but for passes that `compute` `packs`, which have none.
        """
        self._compute = compute
        self._sizes = sizes
        self._groups: list[tuple[list[int], Outputs | None]] = []
        held = 0
        for rows in packed_batches(lengths, budget) if packs else ragged_batches(lengths, budget, None, costs):
            held += sum(lengths[row] for row in rows) if packs else len(rows) * max(lengths[row] for row in rows)
            self._groups.append((rows, compute(rows) if held <= kept else None))

    @property
    def passes(self) -> int:
        """Groups that `groups` has yet to give."""
        return len(self._groups)

    def let_go(self) -> None:
        """Drop graphs that nobody will ask for."""
        self._groups.clear()

    @property
    def first(self) -> list[Tensor]:
        """The first output, detached, a tensor a row."""
        result: list[Tensor] = [torch.empty(0)] * len(self._sizes)
        if not self._groups:
            return result
        order = [row for rows, _ in self._groups for row in rows]
        whole = torch.cat([self._first_of(rows, outputs) for rows, outputs in self._groups]).cpu()
        for row, part in zip(order, torch.split(whole, [self._sizes[row] for row in order]), strict=True):
            result[row] = part
        return result

    @torch.no_grad()
    def _first_of(self, rows: list[int], outputs: Outputs | None) -> Tensor:
        return (self._compute(rows) if outputs is None else outputs)[0].detach()

    def groups(self) -> Iterator[tuple[list[int], Outputs]]:
        """Rows and outputs with a graph, group by group; a group is let go of once the next one is asked for."""
        while self._groups:
            rows, outputs = self._groups.pop(0)
            yield rows, outputs if outputs is not None else self._compute(rows)

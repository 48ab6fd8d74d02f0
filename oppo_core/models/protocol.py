"""Interface of the networks that the engine uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from oppo_core.models.cache import CacheShape, CacheWindow
from oppo_core.models.packed import Packed


class Network(Protocol):
    """A decoder-only transformer with one head: `logits` for a language model, `scalar` for a reward or value model.

    Suffixes give shapes: N rows, T tokens per row, H hidden width, V vocabulary.
    """

    @property
    def attends_by_band(self) -> bool:
        """Whether attention over a window processes each of its `bands` separately."""

    @property
    def context(self) -> int:
        """Longest sequence, tokens."""

    @property
    def width(self) -> int:
        """Hidden width H."""

    @property
    def cache_shape(self) -> CacheShape:
        """Shape of its slot cache."""

    @property
    def refuses_packing(self) -> str:
        """Why it cannot read `Packed` sequences; empty if it can."""

    def hidden(self, tokens_NT: Tensor, positions_NT: Tensor, window: CacheWindow | Packed | None = None) -> Tensor:
        """Last hidden states [N, T, H]. Without a window rows are whole, right-padded and causal.

        Tokens and positions [1, T] may be `Packed`: several sequences that do not attend to each other.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of hidden states [..., H]."""

    def scalar(self, hidden: Tensor) -> Tensor:
        """The head's value [...] of hidden states [..., H]."""

    def parameters(self) -> Iterator[Parameter]:
        """The trainable weights, in a fixed order."""

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Tensor]:
        """All weights by name; with `keep_vars` the parameters themselves."""

    def load_state_dict(self, weights: dict[str, Tensor]) -> object:
        """Load weights."""

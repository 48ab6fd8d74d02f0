"""The proof, at loading, that a model can be streamed: reading in parts gives what one pass gives, our head what its own gives.

The refusals in `supported` name what is known not to work. This finds the rest: a model of a kind that nobody has tried is
used when it passes, and refused with the difference when it does not. It costs a few passes over a dozen tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache

from oppo_contract.model_folder import ModelFolderError
from oppo_core.models.cache import CacheShape, LayerShape, SlotCache
from oppo_core.models.packed import Packed
from oppo_core.models.passthrough_cache import WholeLayer

if TYPE_CHECKING:
    from oppo_core.models.huggingface import HuggingNetwork

PROOF_TOKENS = 12
# For the proof a sliding window is made so narrow that a few tokens reach beyond it.
PROOF_WINDOW = 5
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
ROUGH_TOLERANCE = 0.05


class ShapeLayer(WholeLayer):
    """Notes the shapes of the keys and values that a layer would store."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: LayerShape | None = None
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Note the shapes, give everything back."""
        self.shape = LayerShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        return key_states, value_states


@torch.no_grad()
def cache_shape(backbone: nn.Module, layers: int, name: str) -> CacheShape:
    """What the model called `name` stores a token, found by reading one.

    Raises:
        ModelFolderError: a layer stores no keys and values, or the model does not take such a cache.
    """
    probes = [ShapeLayer() for _ in range(layers)]
    one = torch.zeros(1, 1, dtype=torch.long, device=next(backbone.parameters()).device)
    try:
        backbone(input_ids=one, position_ids=one, past_key_values=Cache(layers=probes), use_cache=True)
    except Exception as error:  # whatever an unknown model raises, the reason is told
        raise ModelFolderError(f"{name} takes no cache of keys and values: {error!r}") from error
    shapes = [probe.shape for probe in probes if probe.shape is not None]
    if len(shapes) < layers:
        raise ModelFolderError(f"{layers - len(shapes)} of the {layers} layers of {name} store no keys and values of their own")
    return CacheShape(tuple(shapes))


@torch.no_grad()
def verify_streaming(network: HuggingNetwork) -> None:
    """Raises ModelFolderError when reading `network` in parts, or through our heads, gives something else than one pass."""
    tokens_1T = _tokens(network)
    positions_1T = torch.arange(tokens_1T.shape[1], device=tokens_1T.device)[None]
    try:
        with _narrow_window(network):
            whole = network.hidden(tokens_1T, positions_1T)
            pairs = [("states", _in_parts(network, tokens_1T, positions_1T), whole), *_heads(network, tokens_1T, whole)]
    except Exception as error:  # whatever an unknown model raises, the reason is told
        raise ModelFolderError(f"{network.name} cannot be read in parts: {error!r}") from error
    for what, ours, theirs in pairs:
        if differ := _apart(what, ours, theirs):
            raise ModelFolderError(f"{network.name} cannot be streamed exactly: {differ}")


@torch.no_grad()
def packed_apart(network: HuggingNetwork) -> str:
    """Why `network` cannot read sequences packed into one row: what it raises, or how far off it is; empty when it can."""
    tokens_1T = _tokens(network)
    length = tokens_1T.shape[1]
    positions_1T = torch.arange(length, device=tokens_1T.device)[None]
    lengths = [length, max(1, length // 3), max(1, length - 1)]
    try:
        with _narrow_window(network):
            whole = network.hidden(tokens_1T, positions_1T)
            tokens, positions = (torch.cat([x[:, :n] for n in lengths], dim=1) for x in (tokens_1T, positions_1T))
            ours = network.hidden(tokens, positions, Packed.of(lengths, tokens_1T.device))
    except Exception as error:  # noqa: BLE001 whatever an unknown model raises, the reason is told
        return f"it does not take packed sequences: {error!r}"
    return _apart("states of packed sequences", ours, torch.cat([whole[:, :n] for n in lengths], dim=1))


def _apart(what: str, ours: Tensor, theirs: Tensor) -> str:
    """How far `ours` is off, where that is more than rounding."""
    allowed = TOLERANCE.get(theirs.dtype, ROUGH_TOLERANCE) * max(1.0, float(theirs.abs().max()))
    difference = float((ours - theirs).abs().max())
    if difference <= allowed:
        return ""
    return f"its {what} differ by {difference:.2g} from those of one pass (allowed: {allowed:.2g})"


@contextmanager
def _narrow_window(network: HuggingNetwork) -> Iterator[None]:
    """Within it layers that slide see `PROOF_WINDOW` positions, in transformers' masks and in ours."""
    config, window_sizes = network.model.config, network.window_sizes
    window: Any = config.sliding_window if any(window_sizes.values()) else None
    if window is None or window <= PROOF_WINDOW:
        yield
        return
    config.sliding_window = PROOF_WINDOW  # transformers reads it at every pass
    network.window_sizes = {kind: reach and PROOF_WINDOW for kind, reach in window_sizes.items()}
    try:
        yield
    finally:
        config.sliding_window, network.window_sizes = window, window_sizes


def _tokens(network: HuggingNetwork) -> Tensor:
    """Different tokens [1, T], none of them padding."""
    config = network.config
    length = min(network.context, PROOF_TOKENS)
    vocab, pad = int(config.vocab_size), getattr(config, "pad_token_id", None)
    ids = [number * 7 % vocab for number in range(vocab) if number * 7 % vocab != pad]
    ids = (ids * (length // len(ids) + 1))[:length]
    return torch.tensor([ids], device=next(network.parameters()).device)


def _in_parts(network: HuggingNetwork, tokens_1T: Tensor, positions_1T: Tensor) -> Tensor:
    """States [1, T, H] of a begin, a longer part and a last token, through the second slot of a cache.

    The windows are wider than the row is long, as they are beside longer rows: a model that takes the last column for the
    newest token is found out.
    """
    length = tokens_1T.shape[1]
    columns = length + 3
    cache = SlotCache(network.cache_shape, 2, columns, next(network.parameters()))
    slot = torch.tensor([1], device=tokens_1T.device)
    begin = max(1, length // 3)
    states = [network.hidden(tokens_1T[:, :begin], positions_1T[:, :begin], cache.fresh_window(slot, begin))]
    for first, end in ((begin, length - 1), (length - 1, length)):
        if first < end:
            window = cache.window(slot, positions_1T[:, first:end], columns)
            states.append(network.hidden(tokens_1T[:, first:end], positions_1T[:, first:end], window))
    return torch.cat(states, dim=1)


def _heads(network: HuggingNetwork, tokens_1T: Tensor, whole: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """What our use of the head gives, and what the model's own forward pass gives."""
    if network.own_head is not None:
        return []
    theirs = network.model(input_ids=tokens_1T, use_cache=False).logits
    if theirs.dim() == 2:
        return [("scores", network.scalar(whole[:, -1]), theirs[:, 0])]
    return [("logits", network.logits(whole), theirs)]

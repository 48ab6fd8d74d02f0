"""Verification after loading: chunked prefill must give the result of one pass, and our use of the head the model's own result.

`supported` refuses known cases by configuration; this check refuses all others, with the difference. It costs a few passes over a
dozen tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from oppo_contract.model_folder import ModelFolderError
from oppo_core.models.cache import SlotCache
from oppo_core.models.huggingface import HuggingFaceNetwork
from oppo_core.models.packed import Packed

TOKENS = 12
# Sliding windows are narrowed to this for the check, so that few tokens exceed them.
WINDOW_SIZE = 5
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.05


@torch.no_grad()
def verify_streaming(network: HuggingFaceNetwork) -> None:
    """Raises ModelFolderError if chunked prefill or our use of the head differs from the model's own forward pass."""
    tokens_1T = _test_tokens(network)
    positions_1T = torch.arange(tokens_1T.shape[1], device=tokens_1T.device)[None]
    try:
        with _narrow_window(network):
            whole = network.hidden(tokens_1T, positions_1T)
            pairs = [
                ("states", _chunked_states(network, tokens_1T, positions_1T), whole),
                *_head_outputs(network, tokens_1T, whole),
            ]
    except Exception as error:  # an unknown model may raise anything
        raise ModelFolderError(f"{network.name} cannot be read in parts: {error!r}") from error
    for what, ours, theirs in pairs:
        if difference := _difference(what, ours, theirs, network.model.dtype):
            raise ModelFolderError(f"{network.name} cannot be streamed exactly: {difference}")


@torch.no_grad()
def packing_error(network: HuggingFaceNetwork) -> str:
    """Why `network` cannot read packed sequences: its exception, or the difference from separate passes; empty if it can."""
    tokens_1T = _test_tokens(network)
    length = tokens_1T.shape[1]
    positions_1T = torch.arange(length, device=tokens_1T.device)[None]
    lengths = [length, max(1, length // 3), max(1, length - 1)]
    try:
        with _narrow_window(network):
            whole = network.hidden(tokens_1T, positions_1T)
            tokens, positions = (torch.cat([x[:, :n] for n in lengths], dim=1) for x in (tokens_1T, positions_1T))
            ours = network.hidden(tokens, positions, Packed.of(lengths, tokens_1T.device))
    except Exception as error:  # noqa: BLE001 an unknown model may raise anything
        return f"it does not take packed sequences: {error!r}"
    separate = torch.cat([whole[:, :n] for n in lengths], dim=1)
    return _difference("states of packed sequences", ours, separate, network.model.dtype)


def _difference(what: str, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> str:
    """The difference of `ours` if it exceeds rounding in `dtype`, the weights', otherwise empty."""
    allowed = TOLERANCE.get(dtype, LOW_PRECISION_TOLERANCE) * max(1.0, float(theirs.abs().max()))
    difference = float((ours - theirs).abs().max())
    if difference <= allowed:
        return ""
    return f"its {what} differ by {difference:.2g} from those of one pass (allowed: {allowed:.2g})"


@contextmanager
def _narrow_window(network: HuggingFaceNetwork) -> Iterator[None]:
    """Narrows sliding windows to `WINDOW_SIZE` positions, in transformers' masks and in ours."""
    config, window_sizes = network.model.config, network.window_sizes
    window: Any = config.sliding_window if any(window_sizes.values()) else None
    if window is None or window <= WINDOW_SIZE:
        yield
        return
    config.sliding_window = WINDOW_SIZE  # transformers reads it in every pass
    network.window_sizes = {kind: size and WINDOW_SIZE for kind, size in window_sizes.items()}
    try:
        yield
    finally:
        config.sliding_window, network.window_sizes = window, window_sizes


def _test_tokens(network: HuggingFaceNetwork) -> Tensor:
    """Distinct tokens [1, T] without the pad token."""
    config = network.config
    length = min(network.context, TOKENS)
    vocab, pad = int(config.vocab_size), getattr(config, "pad_token_id", None)
    ids = [number * 7 % vocab for number in range(vocab) if number * 7 % vocab != pad]
    ids = (ids * (length // len(ids) + 1))[:length]
    return torch.tensor([ids], device=next(network.parameters()).device)


def _chunked_states(network: HuggingFaceNetwork, tokens_1T: Tensor, positions_1T: Tensor) -> Tensor:
    """States [1, T, H] of a first part, a longer part and a last token, through the second slot of a cache.

    The windows are wider than the row, as in passes with longer rows: this detects models that take the last column for the
    newest token.
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


def _head_outputs(network: HuggingFaceNetwork, tokens_1T: Tensor, whole: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """(name, output of our use of the head, output of the model's own forward pass)."""
    if network.own_head is not None:
        return []
    theirs = network.model(input_ids=tokens_1T, use_cache=False).logits
    if theirs.dim() == 2:
        return [("scores", network.scalar(whole[:, -1]), theirs[:, 0])]
    return [("logits", network.logits(whole), theirs)]

"""A `PoolingEngine` where there is no GPU, with a cache of prefixes by the rules that vLLM's sources state.

Whole blocks of what was read stay cached under all that comes before them, as long as there is room; those that nobody has asked
for longest make way. The last token of a request is computed in any case, and so is its block.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import torch

from oppo_core.models.protocol import Network
from tests.fakes.vllm_async_engine import EngineDead

BLOCK = 16  # tokens per block of the prefix cache


class FakePoolingEngine:
    """Reads with one of our networks that gives one number a text."""

    def __init__(self, network: Network, blocks: int = 1 << 20) -> None:
        """`blocks`: how many are kept."""
        self.network: Any = network
        self.computed: list[tuple[str, int]] = []  # what was asked, and how many tokens of it were not found
        self.dead = self.hangs = False
        self._blocks = blocks
        self._cached: OrderedDict[tuple[int, ...], None] = OrderedDict()

    async def encode(self, prompt: Any, pooling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        """See `PoolingEngine`."""
        if pooling_params["task"] != "classify":
            raise ValueError(f"task {pooling_params['task']}")
        await asyncio.sleep(0)
        while self.hangs and not self.dead:
            await asyncio.sleep(0)
        if self.dead:
            raise EngineDead("the engine's process has ended")
        tokens = prompt["prompt_token_ids"]
        found = self._find(tokens)
        self.computed.append((request_id, len(tokens) - found))
        numbers = self._read(tokens)
        if pooling_params["use_activation"] is not False:
            numbers = numbers.sigmoid()
        yield SimpleNamespace(outputs=SimpleNamespace(data=numbers), num_cached_tokens=found, error=None)

    def _find(self, tokens: list[int]) -> int:
        """Tokens of the longest prefix that is cached, which then is the latest asked for; what is new is cached."""
        found = 0
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            prefix = tuple(tokens[:end])
            if prefix in self._cached and end - BLOCK == found and end < len(tokens):
                found = end
            self._cached[prefix] = None
            self._cached.move_to_end(prefix)
        while len(self._cached) > self._blocks:
            self._cached.popitem(last=False)
        return found

    @torch.no_grad()
    def _read(self, tokens: list[int]) -> torch.Tensor:
        hidden = self.network.hidden(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)
        score = self.network.scalar(hidden[:, -1])
        assert math.prod(score.shape) == 1
        return torch.as_tensor(score).reshape(1)

    def shutdown(self, timeout: float | None = None) -> None:
        """See `PoolingEngine`."""
        self.dead = True

"""The parts of vLLM that we use; `make test-vllm` tests them with vLLM itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from collections.abc import Sequence as Items
from typing import Any, Protocol


class Logprobs(Protocol):
    """`vllm.logprobs.FlatLogprobs`: with `logprobs=0` one entry per token, the sampled one's."""

    logprobs: list[float]


class Mask(Protocol):
    """`vllm.outputs.SamplingMask`: sampling support, ids per token."""

    token_ids: list[list[int]]


class VersionSpan(Protocol):
    """`vllm.outputs.WeightVersionSpan`: tokens [start, end) of a request were sampled by the weights with that label."""

    version: str
    start: int
    end: int


class Completion(Protocol):
    """`vllm.outputs.CompletionOutput`, with `RequestOutputKind.DELTA`: the new tokens since the previous output."""

    token_ids: Items[int]
    logprobs: Any
    finish_reason: str | None
    sampling_mask: Any
    weight_versions: Any


class Output(Protocol):
    """`vllm.outputs.RequestOutput`."""

    request_id: str
    outputs: list[Any]
    finished: bool


class AsyncEngine(Protocol):
    """`vllm.v1.engine.async_llm.AsyncLLM`: an engine in another process. Called in its event loop's thread."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncGenerator[Any, None]:
        """Queue a request; yields an `Output` for each group of new tokens. `lora_request`: the adapters it uses."""

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; the last output of each has all its tokens and is finished."""

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling; returns when no pass runs. `mode` keep: requests stay queued; with `clear_cache` prefilled again."""

    async def resume_generation(self) -> None:
        """Resume scheduling."""

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        pass

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        pass

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Connect to the sender of weights."""

    async def start_weight_update(self) -> None:
        """Begin an update."""

    async def update_weights(self, request: Any) -> None:
        """Receive some weights; returns when they are loaded."""

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update; tokens sampled from now on carry this label."""

    async def add_lora(self, lora_request: Any) -> bool:
        """Load adapters; returns when they are loaded."""

    async def update_weight_version(self, new_version: str) -> None:
        """Tokens sampled from now on carry this label."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine's process."""


class WeightTrainer(Protocol):
    """`vllm.distributed.weight_transfer.base.TrainerWeightTransferEngine`: sends weights to an engine."""

    def send_weights(self) -> None:
        """Send all weights; returns when they are loaded."""

    def shutdown(self) -> None:
        """Close the connection."""


class Scores(Protocol):
    """`vllm.outputs.PoolingOutput`: one number per label."""

    data: Any


class Pooled(Protocol):
    """`vllm.outputs.PoolingRequestOutput`; `num_cached_tokens`: tokens found in the prefix cache."""

    outputs: Any
    num_cached_tokens: int
    error: Any


class PoolingEngine(Protocol):
    """The same engine for a pooling model, which generates no tokens."""

    def encode(self, prompt: Any, pooling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        """Queue a request; yields its one `Pooled`."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine's process."""

"""The parts of vLLM that we use. `names.json` holds its own declarations of them, and a test compares (scripts/vllm_names.py)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from collections.abc import Sequence as Items
from typing import Any, Protocol


class Logprobs(Protocol):
    """`vllm.logprobs.FlatLogprobs`: with `logprobs=0` one entry a token, the sampled one's."""

    logprobs: list[float]


class Mask(Protocol):
    """`vllm.outputs.SamplingMask`: what each token was sampled among, ids a token."""

    token_ids: list[list[int]]


class VersionSpan(Protocol):
    """`vllm.outputs.WeightVersionSpan`: tokens [start, end) of a request were sampled by the weights of that label."""

    version: str
    start: int
    end: int


class Completion(Protocol):
    """`vllm.outputs.CompletionOutput`, with `RequestOutputKind.DELTA`: what is new since the output before."""

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


class Engine(Protocol):
    """`vllm.v1.engine.llm_engine.LLMEngine` in our process, so that a step of it is a round of ours."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str:
        """Queue a request; the next `step` reads its prompt."""

    def step(self) -> list[Any]:
        """One pass: an `Output` for each request that got a token."""

    def abort_request(self, request_ids: list[str]) -> None:
        """Forget unfinished requests."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget keys and values; with the flag running requests lose theirs too and are read anew."""

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of the worker that holds the model."""

    def set_weight_version(self, weight_version: str) -> None:
        """Label the weights; outputs tell by which labels their tokens were sampled."""

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Stop scheduling and give memory back; level 2 drops weights, keys and values. `mode` keep: requests stay."""

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Take memory again, of what the tags name; returns whether nothing sleeps any more, and scheduling goes on."""

    def has_unfinished_requests(self) -> bool:
        """Whether a `step` could do anything."""


class AsyncEngine(Protocol):
    """`vllm.v1.engine.async_llm.AsyncLLM`: an engine in another process, which goes on by itself. Asked in its loop's thread."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        """Queue a request, and give an `Output` whenever some of its tokens have come."""

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; the last output of each has what had come, and is finished."""

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Begin no further pass, and return when none runs. `mode` keep: requests stay; with the flag they are read anew."""

    async def resume_generation(self) -> None:
        """Go on."""

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        pass

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        pass

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Meet whoever sends weights."""

    async def start_weight_update(self) -> None:
        """Weights come now."""

    async def update_weights(self, request: Any) -> None:
        """Take some; returns when they are there."""

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All have come; what is sampled from now on is labelled so."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the other process."""


class WeightTrainer(Protocol):
    """`vllm.distributed.weight_transfer.base.TrainerWeightTransferEngine`: who sends weights to an engine."""

    def send_weights(self) -> None:
        """Send all, and return when they are taken."""

    def shutdown(self) -> None:
        """Let go of the connection."""


class Scores(Protocol):
    """`vllm.outputs.PoolingOutput`: a number a label."""

    data: Any


class Pooled(Protocol):
    """`vllm.outputs.PoolingRequestOutput`; `num_cached_tokens` are those that were not computed, because they had been before."""

    outputs: Any
    num_cached_tokens: int
    error: Any


class PoolingEngine(Protocol):
    """The same engine for a model that reads and writes nothing."""

    def encode(self, prompt: Any, pooling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        """Queue a request, and give its one `Pooled`."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the other process."""

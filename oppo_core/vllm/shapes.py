"""The parts of vLLM that we use. `names.json` holds its own declarations of them, and a test compares (scripts/vllm_names.py)."""

from __future__ import annotations

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

    def has_unfinished_requests(self) -> bool:
        """Whether a `step` could do anything."""

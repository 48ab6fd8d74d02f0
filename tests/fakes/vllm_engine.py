"""An `Engine` that decodes with one of our networks: what talks to vLLM is tested with it where there is no GPU.

It reads whole answers anew at each step and holds no keys and values. What it promises is tested together with the real one
(tests/backends/test_actor_contract.py).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from oppo_core.models.protocol import Network
from oppo_core.models.tiny_transformer import TinyTransformer
from oppo_core.rollout.sampling import Filters, sample, sample_filtered, uniforms
from oppo_core.vllm.subprocess_decoder import DROP_WEIGHTS, OFFLOAD_WEIGHTS

STOPPED, LENGTH = "stop", "length"
TAGS = ("weights", "kv_cache")  # what sleeps


@dataclass(slots=True)
class Request:
    """A prompt, what was drawn for it, and the first token of each version's span."""

    prompt: list[int]
    parameters: dict[str, Any]
    drawn: list[int] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)


def load_plain(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put weights that have the names of the model's folder into the network. Raises RuntimeError when they are others'."""
    body = network if isinstance(network, TinyTransformer) else network.get_submodule("model")
    body.load_state_dict(weights)


class FakeEngine:
    """One token a step for every request, under the weights that were last loaded."""

    def __init__(self, network: Network) -> None:
        self.network: Any = deepcopy(network)
        self.requests: dict[str, Request] = {}
        self.resets = 0
        self.asleep: set[str] = set()
        self._label = ""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str:
        """See `Engine`."""
        if request_id in self.requests:
            raise ValueError(f"request {request_id} is there already")
        self.requests[request_id] = Request(list(prompt["prompt_token_ids"]), params)
        return request_id

    @torch.no_grad()
    def step(self) -> list[Any]:
        """See `Engine`: nothing while something sleeps."""
        if self.asleep:
            return []
        return [self._advance(request_id, request) for request_id, request in list(self.requests.items())]

    def _advance(self, request_id: str, request: Request) -> Any:
        tokens = torch.tensor([request.prompt + request.drawn])
        hidden = self.network.hidden(tokens, torch.arange(tokens.shape[1])[None], None)
        token, logprob, mask = self._draw(self.network.logits(hidden[:, -1]), request, tokens.shape[1])
        if not request.spans or request.spans[-1][0] != self._label:
            request.spans.append((self._label, len(request.drawn)))
        request.drawn.append(token)
        reason = self._reason(request)
        versions = self.versions(request) if reason else None
        if reason:
            del self.requests[request_id]
        new = SimpleNamespace(
            token_ids=[token], logprobs=SimpleNamespace(logprobs=[logprob]), finish_reason=reason, weight_versions=versions,
            sampling_mask=SimpleNamespace(token_ids=[mask]) if mask is not None else None,
        )  # fmt: skip
        return SimpleNamespace(request_id=request_id, outputs=[new], finished=bool(reason))

    @staticmethod
    def _draw(logits_1V: Tensor, request: Request, position: int) -> tuple[int, float, list[int] | None]:
        given = request.parameters
        uniform = torch.from_numpy(uniforms(given["seed"], 0, position + 1)[-1:])
        filters = Filters(given.get("top_k"), given.get("top_p"), given.get("min_p"))
        if filters == Filters(None, None, None):
            token, logprob = sample(logits_1V, uniform, given["temperature"])
            return int(token), float(logprob), None
        token, logprob, allowed_1V = sample_filtered(logits_1V, uniform, given["temperature"], filters)
        return int(token), float(logprob), allowed_1V[0].nonzero()[:, 0].tolist()

    @staticmethod
    def _reason(request: Request) -> str | None:
        if request.drawn[-1] in request.parameters["stop_token_ids"]:
            return STOPPED
        return LENGTH if len(request.drawn) == request.parameters["max_tokens"] else None

    @staticmethod
    def versions(request: Request) -> list[Any]:
        """Which weights sampled which of a request's tokens, as `VersionSpan`s."""
        stops = [start for _, start in request.spans[1:]] + [len(request.drawn)]
        spans = zip(request.spans, stops, strict=False)  # none before the first token
        return [SimpleNamespace(version=label, start=start, end=end) for (label, start), end in spans]

    def abort_request(self, request_ids: list[str]) -> None:
        """See `Engine`."""
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `Engine`."""
        self.resets += 1
        return reset_running_requests or not self.requests

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """See `Engine`: knows `reload_weights` alone."""
        if method != "reload_weights":
            raise AttributeError(method)
        if "weights" in self.asleep:
            raise RuntimeError("there is no memory for the weights")
        load_plain(self.network, dict((kwargs or {})["weights_iterator"]))
        return [None]

    def set_weight_version(self, weight_version: str) -> None:
        """See `Engine`."""
        self._label = weight_version

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """See `Engine`: knows mode keep, and level 2, which loses the weights. Whoever sleeps goes on sleeping."""
        if level not in (OFFLOAD_WEIGHTS, DROP_WEIGHTS) or mode != "keep":
            raise ValueError(f"level {level}, mode {mode}")
        self.reset_prefix_cache(reset_running_requests=True)
        self.asleep = set(TAGS)
        if level == OFFLOAD_WEIGHTS:
            return
        with torch.no_grad():
            for weight in self.network.parameters():
                weight.fill_(torch.nan)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """See `Engine`: a tag that is awake already wakes nobody, with the others that are named."""
        woken = set(TAGS) if tags is None else set(tags)
        if woken <= self.asleep:
            self.asleep -= woken
        return not self.asleep

    def has_unfinished_requests(self) -> bool:
        """See `Engine`."""
        return bool(self.requests)

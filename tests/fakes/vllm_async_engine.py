"""An `AsyncEngine` and a sender of weights where there is no GPU, by the rules that vLLM's sources state.

The engine runs ahead of whoever listens, tells a request's first token alone and then so many at a time as were asked for,
keeps what it has not told over a pause, and tells versions with the last output only. Weights come by one of two ways, as vLLM
has them: sent while `update_weights` waits for them, or as handles, which need the consent of the environment.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from oppo_core.models.adapters import has_lora, load_adapter
from oppo_core.models.protocol import Network
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.stop_conditions import StopConditions
from oppo_core.vllm.asyncio_thread import AsyncioThread
from oppo_core.vllm.subprocess_decoder import StreamingDecoder
from oppo_core.vllm.weight_transfer import AdapterTransfer, VllmWeightTransfer, WeightSource, WeightSyncClient, WeightTransfer
from tests.fakes.vllm_engine import FakeEngine, load_plain

ABORTED = "abort"
WAITS_S = 20.0


class EngineDead(Exception):
    """vLLM's `EngineDeadError`."""


@dataclass(slots=True)
class Listener:
    """A request's outputs on their way: what is not told yet, and what nobody has taken yet."""

    interval: int
    held: list[Any] = field(default_factory=list)
    told: int = 0
    ready: list[Any] = field(default_factory=list)
    rings: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, output: Any) -> None:
        """A token has come. The first one, every so many, and the last one are told."""
        self.held.append(output)
        if output.finished or not self.told or len(self.held) >= self.interval:
            self.told += len(self.held)
            self.ready += self.held
            self.held = []
            self.rings.set()


class FakeAsyncEngine:
    """One token a step for every request, whether somebody listens or not."""

    def __init__(self, network: Network, wire: Wire | None = None, interval: int = 1) -> None:
        """`interval`: the engine's own, below which no request's goes."""
        self.core = FakeEngine(network)
        self.dead = False
        self.pauses: list[tuple[str, bool]] = []
        self.handled: list[str] = []
        self._interval, self._wire = interval, wire
        self._listeners: dict[str, Listener] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._updates = self._met = False

    def _alive(self) -> None:
        if self.dead:
            raise EngineDead("the engine's process has ended")

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncGenerator[Any, None]:
        """See `AsyncEngine`. A request without adapters would use none of those that are loaded."""
        self._alive()
        if has_lora(self.core.network) != (lora_request is not None):
            raise ValueError(lora_request)
        await asyncio.sleep(0)  # the prompt is looked at elsewhere
        listener = self._listeners[request_id] = Listener(max(self._interval, sampling_params.get("stream_interval") or 1))
        self.core.add_request(request_id, prompt, sampling_params)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._go_on())
        finished = False
        while not finished:
            await listener.rings.wait()
            self._alive()
            listener.rings.clear()
            output, listener.ready = joined(request_id, listener.ready), []
            finished = output.finished
            yield output

    async def _go_on(self) -> None:
        while self.core.requests and not self.dead:
            await self._goes_on.wait()
            for output in self.core.step():
                listener = self._listeners[output.request_id]
                listener.put(output)
                if output.finished:
                    del self._listeners[output.request_id]
            await asyncio.sleep(0)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """See `AsyncEngine`. Requests that are not there are none of its business."""
        self._alive()
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            if one in self._listeners:
                new = SimpleNamespace(
                    token_ids=[], logprobs=SimpleNamespace(logprobs=[]), finish_reason=ABORTED, sampling_mask=None,
                    weight_versions=self.core.versions(self.core.requests[one]),
                )  # fmt: skip
                self.core.abort_request([one])
                self._listeners.pop(one).put(SimpleNamespace(request_id=one, outputs=[new], finished=True))

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """See `AsyncEngine`: knows mode keep."""
        self._alive()
        if mode != "keep":
            raise ValueError(mode)
        self._goes_on.clear()
        self.pauses.append((mode, clear_cache))
        if clear_cache:
            self.core.reset_prefix_cache(reset_running_requests=True)

    async def resume_generation(self) -> None:
        """See `AsyncEngine`."""
        self._alive()
        self._goes_on.set()

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """See `AsyncEngine`."""
        await self.pause_generation(mode=mode, clear_cache=True)
        self.core.sleep(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """See `AsyncEngine`: who is awake goes on by itself."""
        self._alive()
        awake = self.core.wake_up(tags)
        if awake:
            self._goes_on.set()
        return awake

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """See `AsyncEngine`."""
        self._alive()
        self._met = True

    async def start_weight_update(self) -> None:
        """See `AsyncEngine`."""
        self._alive()
        if not self._met or self._updates:
            raise RuntimeError("there is nobody to take weights from, or some are being taken")
        self._updates = True

    async def update_weights(self, request: Any) -> None:
        """See `AsyncEngine`."""
        self._alive()
        if not self._updates:
            raise RuntimeError("start_weight_update comes first")
        info = request.update_info
        if "ipc_handles" in info:
            if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") != "1":
                raise TypeError("handles are not serializable")
            weights = dict(zip(info["names"], info["ipc_handles"], strict=True))
        else:
            assert self._wire is not None
            weights = await asyncio.get_running_loop().run_in_executor(None, self._wire.receive, info)
        self._load(weights)

    def _load(self, weights: dict[str, Tensor]) -> None:
        if "weights" in self.core.asleep:
            raise RuntimeError("there is no memory for the weights")
        load_plain(self.core.network, weights)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See `AsyncEngine`."""
        self._alive()
        if not self._updates:
            raise RuntimeError("start_weight_update comes first")
        self._updates = False
        if weight_version is not None:
            self.core.set_weight_version(weight_version)
            self.handled.append(weight_version)

    async def add_lora(self, lora_request: Any) -> bool:
        """See `AsyncEngine`. Adapters that are loaded stay unless the request says otherwise."""
        self._alive()
        if "weights" in self.core.asleep or not lora_request.load_inplace:
            raise RuntimeError("adapters cannot be replaced")
        load_adapter(self.core.network, Path(lora_request.lora_path))
        return True

    async def update_weight_version(self, new_version: str) -> None:
        """See `AsyncEngine`."""
        self._alive()
        self.core.set_weight_version(new_version)

    async def die(self) -> None:
        """The other process has ended: whoever listens hears of it."""
        self.dead = True
        self._goes_on.set()
        for listener in self._listeners.values():
            listener.rings.set()

    def shutdown(self, timeout: float | None = None) -> None:
        """See `AsyncEngine`."""
        self.dead = True


def joined(request_id: str, outputs: list[Any]) -> Any:
    """Outputs that nobody has taken, as one."""
    completions = [output.outputs[0] for output in outputs]
    masks = [ids for c in completions if c.sampling_mask is not None for ids in c.sampling_mask.token_ids]
    whole = SimpleNamespace(
        token_ids=[token for c in completions for token in c.token_ids],
        logprobs=SimpleNamespace(logprobs=[logprob for c in completions for logprob in c.logprobs.logprobs]),
        sampling_mask=SimpleNamespace(token_ids=masks) if masks else None,
        finish_reason=completions[-1].finish_reason, weight_versions=completions[-1].weight_versions,
    )  # fmt: skip
    return SimpleNamespace(request_id=request_id, outputs=[whole], finished=outputs[-1].finished)


class Wire:
    """What NCCL is between two GPUs: one side sends while the other one receives, else both wait."""

    def __init__(self) -> None:
        self._passing: list[Tensor] = []
        self._moved = threading.Condition()
        self._is_cut = False

    def send(self, weight: Tensor) -> None:
        """Wait until the one before is taken, or the wire is cut."""
        with self._moved:
            self._moved.wait_for(lambda: self._is_cut or not self._passing, WAITS_S)
            self._passing.append(weight.clone())
            self._moved.notify_all()

    def receive(self, info: dict[str, Any]) -> dict[str, Tensor]:
        """As many weights as are described. Raises ValueError when another one comes, or none."""
        weights = {}
        for name, kind, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            weight = self._take()
            if weight is None or (str(weight.dtype), list(weight.shape)) != (f"torch.{kind}", list(shape)):
                raise ValueError(f"{name} did not come as {kind} {shape}")
            weights[name] = weight
        return weights

    def _take(self) -> Tensor | None:
        with self._moved:
            self._moved.wait_for(lambda: self._is_cut or self._passing, WAITS_S)
            self._moved.notify_all()
            return self._passing.pop() if self._passing else None

    def cut(self) -> None:
        """Nothing more will come: whoever waits at either end goes on."""
        with self._moved:
            self._is_cut = True
            self._moved.notify_all()


class FakeWeightTrainer:
    """A `WeightTrainer`, over a wire or by handles. Like vLLM's it finishes without saying which version it was."""

    def __init__(self, client: WeightSyncClient, source: WeightSource, wire: Wire | None) -> None:
        self._client, self._source, self._wire = client, source, wire
        client.init_weight_transfer_engine({"packed": True})

    def send_weights(self) -> None:
        """See `WeightTrainer`."""
        self._client.start_weight_update()
        if self._wire is None:
            self._weight_transfer(list(self._source))
        else:
            self._broadcast(self._wire)
        self._client.finish_weight_update()

    def _weight_transfer(self, weights: list[tuple[str, Tensor]]) -> None:
        self._client.update_weights({"names": [n for n, _ in weights], "ipc_handles": [w for _, w in weights]})

    def _broadcast(self, wire: Wire) -> None:
        told = [asdict(meta) for meta in self._source.metadata()]
        info = {
            "names": [meta["name"] for meta in told], "shapes": [list(meta["shape"]) for meta in told],
            "dtype_names": [str(meta["dtype"]).removeprefix("torch.") for meta in told],
        }  # fmt: skip
        with ThreadPoolExecutor(1) as beside:
            taken = beside.submit(self._client.update_weights, info)
            try:
                for meta, (name, weight) in zip(told, self._source, strict=True):
                    if (name, weight.dtype, tuple(weight.shape)) != tuple(meta.values()):
                        raise ValueError(f"{name} comes where {meta['name']} was told")
                    wire.send(weight)
            except ValueError:
                wire.cut()
                raise
            taken.result()

    def shutdown(self) -> None:
        """See `WeightTrainer`."""
        if self._wire is not None:
            self._wire.cut()


def lora_request(name: str, number: int, path: str, load_inplace: bool = False) -> SimpleNamespace:
    """`vllm.lora.request.LoRARequest`."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path, load_inplace=load_inplace)


def streaming(
    network: Network, settings: DecodeSettings, stops: StopConditions | None, interval: int, handles: bool, sleeps: bool,
    silence_s: float = WAITS_S,
) -> StreamingDecoder:  # fmt: skip
    """A `StreamingDecoder` over these two, whose weights are `network`'s, or whose adapters if it has some."""
    assert isinstance(network, nn.Module)
    wire, loop = None if handles else Wire(), AsyncioThread(silence_s)
    engine = FakeAsyncEngine(network, wire)
    client = WeightSyncClient(engine, loop, SimpleNamespace, SimpleNamespace)
    if has_lora(network):
        transfer: WeightTransfer = AdapterTransfer(engine, loop, network, lora_request)
    else:
        transfer = VllmWeightTransfer(FakeWeightTrainer(client, WeightSource(network), wire), client)
    return StreamingDecoder(engine, loop, settings, transfer, stops, interval, parameters=dict, sleeps=sleeps)

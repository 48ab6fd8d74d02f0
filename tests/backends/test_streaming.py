"""A decoder over an engine that goes on by itself: what it writes ahead, how weights get there, and how it fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from oppo_contract.spec import TinyArchitecture
from oppo_core.models.tiny_transformer import TinyTransformer, init_tiny
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.stop_conditions import StopConditions
from oppo_core.rollout.tokenizer import ByteCodec
from oppo_core.vllm.asyncio_thread import AsyncioThread
from oppo_core.vllm.engine_args import IPC_ENVIRONMENT
from oppo_core.vllm.errors import VllmError
from oppo_core.vllm.subprocess_decoder import StreamingDecoder
from oppo_core.vllm.weight_transfer import VllmWeightTransfer, WeightSource, WeightSyncClient, largest_weight, trainer_arguments
from oppo_estimate.memory import PACK_BYTES, pack_bytes
from tests.fakes.vllm_async_engine import EngineDead, FakeAsyncEngine, FakeWeightTrainer, Wire, streaming

VOCAB = 40
SETTINGS = DecodeSettings(seed=3, eos=1, temperature=0.9, max_prompt=12, max_new=30, micro_batch_tokens=400)
Make = Callable[..., tuple[StreamingDecoder, Any]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv(*next(iter(IPC_ENVIRONMENT.items())))
    made = []

    def of(settings: DecodeSettings = SETTINGS, interval: int = 4, handles: bool = False, **more: Any) -> Any:
        network = small_network()
        more = {"stops": None, "sleeps": False} | more
        decoder = streaming(network, settings, interval=interval, handles=handles, **more)
        made.append(decoder)
        return decoder, network

    yield of
    for decoder in made:
        decoder.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "oppo-vllm"]


def small_network() -> TinyTransformer:
    return init_tiny(TinyArchitecture(vocab=VOCAB, context=64, hidden=16, layers=2, heads=2), "lm", 0).double()


def sequences(count: int) -> list[Sequence]:
    return [Sequence(i, 0, np.asarray([3 + i % 30] * (1 + i % 12))) for i in range(count)]


def engine_of(decoder: StreamingDecoder) -> FakeAsyncEngine:
    assert isinstance(decoder.engine, FakeAsyncEngine)
    return decoder.engine


def until_written(decoder: StreamingDecoder, sequence: Sequence, count: int) -> None:
    """Wait until the engine has written so many tokens of an answer, told or not."""

    async def written() -> None:
        requests = engine_of(decoder).core.requests
        while any(i.startswith(f"{sequence.sequence_id}.") and len(r.drawn) < count for i, r in requests.items()):
            await asyncio.sleep(0)

    decoder._loop.run(written(), "waiting")


@contextmanager
def written_up_to(decoder: StreamingDecoder, count: int) -> Iterator[None]:
    """Within it the engine writes so many tokens of each answer, and then waits."""
    core: Any = engine_of(decoder).core
    advance = torch.no_grad()(core._advance)
    core.step = lambda: [advance(i, request) for i, request in list(core.requests.items()) if len(request.drawn) < count]
    yield
    del core.step


def write_ahead(decoder: StreamingDecoder, some: list[Sequence], version: int) -> None:
    """A step that takes two tokens of each answer, while the engine writes twelve."""
    decoder.begin(some, version)
    decoder.advance(2, version)
    for sequence in some:
        until_written(decoder, sequence, 12)
    decoder.pause()


def to_the_end(decoder: StreamingDecoder, version: int) -> None:
    while decoder.live:
        decoder.advance(7, version)


@pytest.mark.parametrize("interval", [1, 3, 8])
def test_tokens_beyond_the_batch_begin_the_next_step_with_their_version(make: Make, interval: int) -> None:
    """Also where the engine holds back what it has not told when it is paused: it comes with tokens of the next weights."""
    decoder, network = make(replace(SETTINGS, eos=-1), interval=interval)
    some = sequences(4)
    with written_up_to(decoder, 12):
        write_ahead(decoder, some, 5)
    written = {int(i.partition(".")[0]): len(request.drawn) for i, request in engine_of(decoder).core.requests.items()}
    assert all(s.length <= 2 for s in some)
    with torch.no_grad():
        for weight in network.parameters():
            weight *= 1.1
    decoder.begin([s for s in some if not s.finished], 6)
    to_the_end(decoder, 6)
    assert len(written) == 4
    for sequence_id, count in written.items():
        versions = some[sequence_id].token_versions
        assert versions == [5] * count + [6] * (len(versions) - count)


def test_caches_are_forgotten_with_the_weights_unless_they_are_kept(make: Make) -> None:
    for keeps, forgets in ((False, True), (True, False)):
        decoder, _ = make(replace(SETTINGS, keeps_cache=keeps))
        some = sequences(3)
        with written_up_to(decoder, 12):
            decoder.begin(some, 0)
            decoder.advance(2, 0)
            decoder.pause()
        left = [s for s in some if not s.finished]
        asked = set(engine_of(decoder).core.requests)
        decoder.begin(left, 1)
        assert set(engine_of(decoder).core.requests) <= asked
        assert set(engine_of(decoder).pauses) == {("keep", forgets)}
        assert all(s.kept_version == (0 if keeps else None) for s in left)
        to_the_end(decoder, 1)


def test_an_answer_that_begins_anew_under_its_number_is_another_one(make: Make) -> None:
    decoder, _ = make()
    first = sequences(1)
    decoder.begin(first, 0)
    to_the_end(decoder, 0)
    some = sequences(1)
    decoder.begin(some, 0)
    decoder.advance(3, 0)
    decoder.pause()
    again = [some[0].restarted()]
    decoder.begin(again, 0)
    to_the_end(decoder, 0)
    assert again[0].response == first[0].response
    assert some[0].length <= 3


@pytest.mark.parametrize("half_way", [False, True])
def test_pending_tokens_survive_a_pause(make: Make, half_way: bool, tmp_path: Path) -> None:
    decoder, _ = make()
    some = sequences(4)
    decoder.begin(some, 2)
    decoder.advance(3, 2)
    for sequence in some:
        until_written(decoder, sequence, 8)
    if not half_way:
        decoder.pause()
    decoder.save(tmp_path)
    other, _ = make()
    other.load(tmp_path, some)
    left = [s for s in some if not s.finished]
    other.begin(left, 2 if half_way else 3)
    to_the_end(other, 3)
    plain, _ = make()
    expected = sequences(4)
    plain.begin(expected, 2)
    to_the_end(plain, 2)
    assert [s.response for s in some] == [s.response for s in expected]
    for sequence in left:
        first = sequence.stale_tokens(3)
        assert first == sequence.length if half_way else first >= min(8, sequence.length)


@pytest.mark.parametrize("sleeps", [False, True])
def test_an_answer_that_begins_anew_is_sampled_under_the_present_weights(make: Make, sleeps: bool) -> None:
    """What still arrives of the answer before, whose request was abandoned, is no error."""
    decoder, _ = make(replace(SETTINGS, eos=-1), interval=8, sleeps=sleeps)
    some = sequences(3)
    with written_up_to(decoder, 12):
        write_ahead(decoder, some, 5)
    again = [sequence.restarted() for sequence in some]
    decoder.begin(again, 6)
    to_the_end(decoder, 6)
    assert all(set(s.token_versions) == {6} for s in again)


def test_an_answer_that_we_end_is_ended_there(make: Make) -> None:
    stops = StopConditions(list(range(5, 20)), [], ByteCodec(VOCAB))
    decoder, _ = make(stops=stops)
    some = sequences(6)
    decoder.begin(some, 0)
    to_the_end(decoder, 0)
    assert {s.ending for s in some} & {"stop"}
    assert not engine_of(decoder).core.requests
    assert all(len(s.token_versions) == s.length for s in some)


def test_an_end_that_overtakes_its_request_is_asked_for_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo_core.vllm.subprocess_decoder.ABORT_RETRY_S", 0.01)
    decoder, _ = make()
    plain, late = engine_of(decoder).generate, asyncio.Event()

    async def generate(*given: Any, **more: Any) -> Any:
        await late.wait()
        async for output in plain(*given, **more):
            yield output

    asked = []
    abort = engine_of(decoder).abort

    async def noted(request_id: Any) -> None:
        asked.append(request_id)
        if len(asked) > 1:
            late.set()
        await abort(request_id)

    monkeypatch.setattr(decoder.engine, "generate", generate)
    monkeypatch.setattr(decoder.engine, "abort", noted)
    decoder.begin(sequences(1), 0)
    decoder.begin([], 0)
    assert len(asked) > 1
    assert not engine_of(decoder).core.requests


def test_a_dead_engine_is_an_error(make: Make) -> None:
    decoder, _ = make()
    with written_up_to(decoder, 3):
        decoder.begin(some := sequences(2), 0)
        until_written(decoder, some[0], 3)
        decoder._loop.run(engine_of(decoder).die(), "dying")
        with pytest.raises(VllmError, match="EngineDead: the engine's process has ended"):
            to_the_end(decoder, 0)
    with pytest.raises(VllmError, match="vLLM failed at pausing"):
        decoder.pause()


def test_a_silent_engine_is_taken_for_hung(make: Make) -> None:
    decoder, _ = make(silence_s=0.05)
    decoder.begin(sequences(2), 0)
    engine_of(decoder)._goes_on.clear()
    with pytest.raises(VllmError, match=r"wrote no token for 0.05 s \(resources.longest_silence_s\)"):
        to_the_end(decoder, 0)
    with pytest.raises(VllmError, match=r"gave no answer for 0\.05 s at waiting"):
        decoder._loop.run(asyncio.sleep(60), "waiting")


def test_a_token_that_came_before_its_weights_is_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, _ = make()
    monkeypatch.setattr(engine_of(decoder).core, "set_weight_version", lambda label: None)
    engine_of(decoder).core._label = "7"
    decoder.begin(sequences(1), 3)
    with pytest.raises(VllmError, match=r"vLLM sampled under \[7, .*, recorded were \[3, "):
        to_the_end(decoder, 3)


def test_handles_need_the_environments_consent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, _ = make(handles=True)
    monkeypatch.delenv(next(iter(IPC_ENVIRONMENT)))
    with pytest.raises(VllmError, match="loading weights: TypeError: handles are not serializable"):
        decoder.begin(sequences(1), 0)


class Misled(WeightSource):
    """Gives other weights than it has said."""

    def metadata(self) -> Any:
        return super().metadata()[::-1]


def test_weights_that_are_not_those_that_were_told_are_an_error() -> None:
    network, wire, loop = small_network(), Wire(), AsyncioThread(5.0)
    client = WeightSyncClient(FakeAsyncEngine(network, wire), loop, SimpleNamespace, SimpleNamespace)
    try:
        with pytest.raises(VllmError, match=r"the weight transfer failed: ValueError: .* was told"):
            VllmWeightTransfer(FakeWeightTrainer(client, Misled(network), wire), client).send(1)
    finally:
        loop.close()


def test_an_engine_that_dies_while_it_takes_weights_keeps_nobody_waiting() -> None:
    """The sender stands at the wire, as NCCL's does on the GPU, where no error of the engine's would reach it."""

    class Dying(Wire):
        def receive(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
            raise EngineDead("the engine's process has ended")

    network, wire, loop = small_network(), Dying(), AsyncioThread(20.0)
    client = WeightSyncClient(FakeAsyncEngine(network, wire), loop, SimpleNamespace, SimpleNamespace)
    try:
        with pytest.raises(VllmError, match="failed at loading weights: EngineDead: the engine's process has ended"):
            VllmWeightTransfer(FakeWeightTrainer(client, WeightSource(network), wire), client).send(1)
    finally:
        loop.close()


def test_a_buffer_that_handles_lead_to_holds_the_largest_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sender refuses a weight that does not fit into it; by NCCL such a weight ends its pack."""
    largest = largest_weight(WeightSource(small_network()))
    assert largest == 64 * 16 * 8  # of the places
    assert trainer_arguments(0, largest)["packed_buffer_size_bytes"] == PACK_BYTES
    for module in ("oppo_core.vllm.weight_transfer", "oppo_estimate.memory"):
        monkeypatch.setattr(f"{module}.PACK_BYTES", largest - 1)
    assert [trainer_arguments(n, largest)["packed_buffer_size_bytes"] for n in (0, 2)] == [largest, largest - 1]
    assert [pack_bytes(largest, n) for n in (0, 2)] == [largest, 2 * largest - 1]

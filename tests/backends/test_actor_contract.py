"""The contract of every decoder: ours, vLLM itself where it is installed (on a GPU or this CPU), and the fake of its engine."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from oppo_contract.sections.models import Lora
from oppo_contract.spec import ModelSpec, TinyArchitecture, load_spec
from oppo_core.models.adapters import inject_lora
from oppo_core.models.model_io import load_model
from oppo_core.models.protocol import Network
from oppo_core.models.tiny_transformer import init_tiny
from oppo_core.rollout.decoder import Decoder, DecoderProtocol, DecodeSettings
from oppo_core.rollout.sampling import Filters
from oppo_core.rollout.sampling_support import mask_unsupported
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.stop_conditions import StopConditions
from oppo_core.rollout.tokenizer import ByteCodec
from oppo_core.vllm.build import build_decoder
from oppo_core.vllm.engine_args import IPC_ENVIRONMENT
from oppo_core.vllm.subprocess_decoder import StreamingDecoder
from tests.fakes.vllm_async_engine import streaming
from tests.processes import still_running

VOCAB, EOS, SLOTS = 259, 1, 8
OPEN: list[StreamingDecoder] = []  # to be closed after a test
REAL: dict[Any, tuple[StreamingDecoder, Any, dict[str, torch.Tensor]]] = {}  # to be closed after all of them
LORA = Lora(rank=2, alpha=4.0)
SETTINGS = DecodeSettings(seed=3, eos=EOS, temperature=0.9, max_prompt=12, max_new=40, micro_batch_tokens=400)


@dataclass(frozen=True, slots=True)
class Backend:
    """How to make a decoder of a kind, the network whose weights it decodes with, and how near its log-probs are."""

    make: Callable[..., tuple[DecoderProtocol, Network]]
    tolerance: float
    exact: bool = True  # whether company and chunks change no token
    stops: bool = True  # whether nothing is written beyond the last round


def torch_decoder(folder: Path, settings: DecodeSettings, stops: StopConditions | None) -> tuple[DecoderProtocol, Network]:
    network = small_network()
    return Decoder(network, settings, SLOTS, stops=stops), network


def vllm_decoder(
    folder: Path, settings: DecodeSettings, stops: StopConditions | None, sleeps: bool = False, devices: int = 0,
    adapters: bool = False,
) -> tuple[DecoderProtocol, Network]:  # fmt: skip
    """vLLM on our GPU, on `devices` of its own, or on this CPU. An engine takes long to start, so the next decoder reuses it."""
    if settings.filters is not None and not torch.cuda.is_available():
        pytest.skip("vLLM reports its sampling mask on a GPU only")
    arguments = (sleeps, devices, adapters, settings.keeps_cache, settings.filters is None)
    if arguments in REAL:
        decoder, network, weights = REAL[arguments]
        REAL[arguments] = reuse(decoder, network, weights, settings, stops), network, weights
        return REAL[arguments][0], network
    network, device = real_network(folder, bool(sleeps) + devices)
    network = with_adapters(network) if adapters else network
    resources = {"devices": 1 + devices, "decoding_devices": devices, "longest_silence_s": 600.0, "kind": device.type}
    spec = load_spec(
        {
            "name": "n", "steps": 1, "data": {"prompts": "p"}, "resources": resources,
            "models": {"actor": {"path": "a"}, "reward": {"rule": "r:score"}, "lora": LORA.model_dump() if adapters else None},
            "overlap": {"chunk": {"size": 4}},
            "rollout": {
                "backend": "vllm", "max_prompt_tokens": settings.max_prompt, "max_new_tokens": settings.max_new,
                **({"vllm_memory_share": 0.3, "vllm_sleep": sleeps} if device.type == "cuda" else {}),
            },
        }
    )  # fmt: skip
    decoder = build_decoder(spec, folder, network, settings, stops, SLOTS, device)
    REAL[arguments] = decoder, network, deepcopy(network.state_dict())
    return decoder, network


def reuse(
    before: StreamingDecoder, network: Any, weights: dict[str, torch.Tensor], settings: DecodeSettings,
    stops: StopConditions | None,
) -> StreamingDecoder:  # fmt: skip
    """Another decoder over an engine, with the first weights and without requests of the decoder before."""
    before.begin([], int(before._version or 0) + 1)
    network.load_state_dict(weights)
    return StreamingDecoder(
        before.engine, before._loop, settings, before._weight_transfer, stops, 4, sleeps=before._sleeps,
        draws_by_position=before._draws_by_position,
    )  # fmt: skip


def real_network(folder: Path, gpus: int) -> tuple[Any, torch.device]:
    """A network of an architecture that vLLM supports, and its device. Skips without vLLM or with fewer than `gpus` GPUs."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed (make test-vllm)")
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"it needs {gpus} GPUs, {torch.cuda.device_count()} are present")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return load_model(ModelSpec(path=str(folder)), "lm", [], torch.float32, 0, device=device), device


def fake_streaming_decoder(
    folder: Path,
    settings: DecodeSettings,
    stops: StopConditions | None,
    interval: int,
    handles: bool = False,
    sleeps: bool = False,
    adapters: bool = False,
) -> tuple[DecoderProtocol, Network]:
    network = small_network(adapters)
    decoder = streaming(network, settings, stops, interval, handles, sleeps)
    OPEN.append(decoder)
    return decoder, network


BACKENDS = {
    "torch": Backend(torch_decoder, 1e-9),
    "vllm-fake-nccl": Backend(partial(fake_streaming_decoder, interval=1), 1e-9, stops=False),
    "vllm-fake-ipc": Backend(partial(fake_streaming_decoder, interval=4, handles=True), 1e-9, stops=False),
    "vllm-fake-ipc-sleep": Backend(partial(fake_streaming_decoder, interval=4, handles=True, sleeps=True), 1e-9, stops=False),
    "vllm-fake-adapters": Backend(partial(fake_streaming_decoder, interval=4, adapters=True), 1e-9, stops=False),
    "vllm-fake-adapters-sleep": Backend(
        partial(fake_streaming_decoder, interval=4, adapters=True, sleeps=True), 1e-9, stops=False
    ),
    "vllm": Backend(vllm_decoder, 1e-3, exact=False, stops=False),
    "vllm-sleep": Backend(partial(vllm_decoder, sleeps=True), 1e-3, exact=False, stops=False),
    "vllm-adapters": Backend(partial(vllm_decoder, adapters=True), 1e-3, exact=False, stops=False),
    "vllm-nccl": Backend(partial(vllm_decoder, devices=1), 1e-3, exact=False, stops=False),
}


def small_network(adapters: bool = False) -> Network:
    network = init_tiny(TinyArchitecture(vocab=VOCAB, context=64, hidden=16, layers=2, heads=2), "lm", 0).double()
    return with_adapters(network) if adapters else network


def with_adapters(network: Any) -> Any:
    """The network with adapters that already change what it computes."""
    inject_lora(network, LORA, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if ".lora_B." in name:
                weight += 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
    return network


@pytest.fixture(scope="module", autouse=True)
def engines_end() -> Iterator[None]:
    """vLLM's engines leave no process, thread or file."""
    resource_tracker.ensure_running()  # of Python's multiprocessing: it ends with this process
    before = set(psutil.Process().children(recursive=True))
    yield
    while REAL:
        REAL.popitem()[1][0].close()
    assert not still_running(before)
    assert not [thread for thread in threading.enumerate() if thread.name == "oppo-vllm"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@pytest.fixture
def make(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[DecoderProtocol, Network]]]:
    def made(settings: DecodeSettings = SETTINGS, stops: StopConditions | None = None) -> tuple[DecoderProtocol, Network]:
        return backend.make(tmp_path / "model", settings, stops)

    for name, value in IPC_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    yield made
    while OPEN:
        OPEN.pop().close()
    assert len([thread for thread in threading.enumerate() if thread.name == "oppo-vllm"]) == len(REAL)


def sequences(count: int, first: int = 0) -> list[Sequence]:
    return [Sequence(i, 0, np.asarray([3 + i % 30] * (1 + i % 12))) for i in range(first, first + count)]


def to_the_end(decoder: DecoderProtocol, version: int = 0, chunk: int = 7) -> list[Sequence]:
    finished: list[Sequence] = []
    while decoder.live:
        done, used = decoder.advance(chunk, version)
        assert used == chunk or done
        finished += done
    return finished


def logprobs_by(network: Network, sequence: Sequence, temperature: float) -> Any:
    """What one pass of the network over the whole answer gives to its tokens."""
    tokens = torch.from_numpy(sequence.tokens())[None]
    device = next(network.parameters()).device
    with torch.no_grad():
        hidden = network.hidden(tokens.to(device), torch.arange(tokens.shape[1], device=device)[None])
        logits = network.logits(hidden[0, len(sequence.prompt) - 1 : -1]) / temperature
    told = torch.tensor(sequence.response, device=device)[:, None]
    return torch.log_softmax(mask_unsupported(logits, sequence.support), -1).gather(-1, told)[:, 0].cpu().numpy()


def test_each_token_has_a_version_and_the_log_prob_that_the_trainer_finds(backend: Backend, make: Any) -> None:
    decoder, network = make()
    some = sequences(6)
    assert decoder.begin(some, 4) == sum(len(s.prompt) - 1 for s in some)
    finished = to_the_end(decoder, 4)
    assert sorted(s.sequence_id for s in finished) == list(range(6))
    for sequence in finished:
        assert sequence.token_versions == [4] * sequence.length
        np.testing.assert_allclose(
            sequence.behaviour_logprobs, logprobs_by(network, sequence, SETTINGS.temperature), atol=backend.tolerance
        )
    assert decoder.decoded == sum(s.length for s in finished)
    assert decoder.rounds >= max(s.length for s in finished)


def test_it_stops_at_the_round_in_which_one_finishes(make: Any) -> None:
    decoder, _ = make()
    decoder.begin(some := sequences(6), 0)
    while decoder.live:
        before = [s.length for s in some if not s.finished]
        live = [s for s in some if not s.finished]
        done, used = decoder.advance(5, 0)
        assert [s.sequence_id for s in done] == sorted(s.sequence_id for s in live if s.finished)
        assert max(s.length - n for s, n in zip(live, before, strict=True)) == used
        assert {s.sequence_id for s in decoder.live} == {s.sequence_id for s in some if not s.finished}
        assert all(s.response[-1] == EOS or s.length == SETTINGS.max_new for s in done)


def test_neither_company_nor_chunks_change_a_token(backend: Backend, make: Any) -> None:
    answers = []
    for group, chunk in ((6, 7), (6, 1), (2, 40)):
        decoder, _ = make()
        some = sequences(6)
        for first in range(0, 6, group):
            decoder.begin(some[first : first + group], 0)
            to_the_end(decoder, 0, chunk)
        answers.append([s.response for s in some])
    if backend.exact:
        assert answers[0] == answers[1] == answers[2]
    assert len({tuple(response) for response in answers[0]}) == 6


def test_deferred_answers_go_on_under_new_weights(backend: Backend, make: Any) -> None:
    decoder, network = make()
    some = sequences(4)
    decoder.begin(some, 0)
    decoder.advance(6, 0)
    old = [s for s in some if not s.finished]
    assert old
    before = {s.sequence_id: s.length for s in old}
    decoder.pause()
    older = deepcopy(network)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.requires_grad:
                weight *= 1.1
    fresh = sequences(2, 10)
    assert decoder.begin([*old, *fresh], 1) == sum(len(s.tokens()) - 1 for s in [*old, *fresh])
    to_the_end(decoder, 1)
    for sequence in [*old, *fresh]:
        first = sequence.stale_tokens(1)
        assert sequence.token_versions == [0] * first + [1] * (sequence.length - first)
        done = before.get(sequence.sequence_id, 0)
        assert first == done or (done and first > done and not backend.stops)  # what was written beyond the stop is older
        for weights, part in ((older, slice(first)), (network, slice(first, None))):
            found = logprobs_by(weights, sequence, SETTINGS.temperature)
            np.testing.assert_allclose(sequence.behaviour_logprobs[part], found[part], atol=backend.tolerance)
    assert all(s.kept_version is None for s in some)


def test_a_step_without_an_update_goes_on_with_the_same_weights(backend: Backend, make: Any) -> None:
    answers = []
    for rests in (False, True):
        decoder, _ = make()
        some = sequences(4)
        decoder.begin(some, 3)
        decoder.advance(4, 3)
        if rests:
            decoder.pause()
        decoder.begin([s for s in some if not s.finished], 3)
        to_the_end(decoder, 3)
        answers.append([s.response for s in some])
    if backend.exact:
        assert answers[0] == answers[1]


def test_an_answer_that_begins_anew_under_its_number_is_another_one(backend: Backend, make: Any) -> None:
    """As tail batching has it: in the very next step perhaps, with the same random numbers."""
    decoder, _ = make()
    decoder.begin(some := sequences(3), 0)
    decoder.advance(4, 0)
    decoder.pause()
    again = [s.restarted() for s in some]
    decoder.begin(again, 0)
    to_the_end(decoder)
    assert all(s.length <= 4 for s in some)
    for old, new in zip(some, again, strict=True):
        assert new.finished
        assert not backend.exact or new.response[: old.length] == old.response


def test_omitted_sequences_are_dropped(make: Any) -> None:
    decoder, _ = make()
    some = sequences(5)
    decoder.begin(some, 0)
    decoder.advance(3, 0)
    left = [s for s in some if not s.finished][:1]
    dropped = [(s, s.length) for s in some if not s.finished][1:]
    decoder.begin(left, 0)
    to_the_end(decoder)
    assert left[0].finished
    assert [s.length for s, _ in dropped] == [length for _, length in dropped]


def test_interrupted_it_goes_on_elsewhere_with_the_same_tokens(backend: Backend, make: Any, tmp_path: Path) -> None:
    answers = []
    for stop_after in (None, 3, 8):
        decoder, _ = make()
        some = sequences(4)
        decoder.begin(some, 2)
        if stop_after is not None:
            for _ in range(stop_after):
                decoder.advance(1, 2)
            decoder.save(tmp_path)
            decoder, _ = make()
            decoder.load(tmp_path, some)
            decoder.begin([s for s in some if not s.finished], 2)
        to_the_end(decoder, 2)
        answers.append(([s.response for s in some], [s.token_versions for s in some]))
    if backend.exact:
        assert answers[0] == answers[1] == answers[2]


def test_stop_tokens_and_texts_end_an_answer_at_their_last_token(make: Any) -> None:
    stops = StopConditions([40, 41, 42, 43], ["a", "bc", "7"], ByteCodec(VOCAB))
    decoder, _ = make(stops=stops)
    some = sequences(8)
    decoder.begin(some, 0)
    to_the_end(decoder)
    assert {s.ending for s in some} >= {"stop"}
    for sequence in some:
        again = Sequence(sequence.sequence_id, 0, sequence.prompt)
        ends = []
        for token in sequence.response:
            again.response.append(token)
            ends.append(token == EOS or stops.reached(again))
        assert not any(ends[:-1])
        assert ends[-1] == (sequence.ending != "length")


def test_filters_leave_few_tokens_and_say_which(backend: Backend, make: Any) -> None:
    filtered = replace(SETTINGS, filters=Filters(20, 0.9, None))
    decoder, network = make(filtered)
    some = sequences(4)
    decoder.begin(some, 0)
    to_the_end(decoder)
    for sequence in some:
        assert len(sequence.support) == sequence.length
        np.testing.assert_allclose(
            sequence.behaviour_logprobs, logprobs_by(network, sequence, SETTINGS.temperature), atol=backend.tolerance
        )

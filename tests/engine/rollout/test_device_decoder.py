"""`DeviceDecoder` samples the same tokens in the same rounds as `Decoder`; here both run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oppo_contract.spec import ModelSpec
from oppo_core.models.cuda_graphs import CudaGraphs, graphed_if_cuda
from oppo_core.models.model_io import load_model
from oppo_core.rollout import device_decoder
from oppo_core.rollout.decoder import Decoder, DecodeSettings
from oppo_core.rollout.device_decoder import DeviceDecoder, build_decoder
from oppo_core.rollout.sampling import Filters
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.stop_conditions import StopConditions
from oppo_core.train import train
from tests.engine.models.test_host_device import waiting_calls

SETTINGS = DecodeSettings(3, 2, 0.9, 12, 40, 400)
SLOTS = 9


@dataclass(slots=True)
class Plan:
    """Steps of a run: new prompts per step, chunks in rounds, and whether the step is interrupted after a chunk."""

    fresh: list[int]
    chunks: list[int]
    interrupted: set[int] = field(default_factory=set)


plans = st.builds(
    Plan,
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.sets(st.integers(0, 5), max_size=2),
)


@pytest.fixture(autouse=True, scope="module")
def many_shapes() -> Iterator[None]:
    """Column step of 8, so that the round shape changes within a run."""
    with mock.patch.object(device_decoder, "SHAPES", replace(device_decoder.SHAPES, column_step=8)):
        yield


@pytest.fixture(scope="module")
def actor(world: Any) -> Any:
    return load_model(ModelSpec(path="actor"), "lm", [world.folder], torch.float64, 0)


def prompt(number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray([3 + number % 30] * (1 + number % 12))


def run(kind: type[Decoder], actor: Any, plan: Plan, given: DecodeSettings = SETTINGS, stops: Any = None) -> list[Any]:
    """Decode `plan`: finished sequences with their rounds, and all sequences at the end."""
    decoder, told, some = kind(actor, given, SLOTS, stops=stops), [], []
    for version, count in enumerate(plan.fresh):
        going_on = [s for s in some if not s.finished][: SLOTS - count]
        fresh = [Sequence(len(some) + n, 0, prompt(len(some) + n)) for n in range(count)]
        some += fresh
        decoder.begin([*going_on, *fresh], version)
        for number, rounds in enumerate(plan.chunks):
            if not decoder.live:
                break
            done, used = decoder.advance(rounds, version)
            told.append(([s.sequence_id for s in done], used, decoder.rounds, decoder.decoded, len(decoder.live)))
            if number in plan.interrupted:
                decoder = moved(decoder, kind(actor, given, SLOTS, stops=stops), version)
    return [told, [replace(s, behaviour_logprobs=[]) for s in some], [s.behaviour_logprobs for s in some]]


def moved(decoder: Decoder, other: Decoder, version: int) -> Decoder:
    """`other`, continued from the state of `decoder`, as after an interruption."""
    with TemporaryDirectory() as folder:
        decoder.save(Path(folder))
        other.load(Path(folder), decoder.live)
    other.begin(decoder.live, version)
    other.rounds, other.decoded = decoder.rounds, decoder.decoded
    return other


def agree(one: list[Any], other: list[Any]) -> None:
    assert [repr(row) for row in one[1]] == [repr(row) for row in other[1]]
    assert one[0] == other[0]
    for logprobs, others in zip(one[2], other[2], strict=True):
        assert logprobs == pytest.approx(others, abs=1e-10)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans)
def test_same_tokens_in_the_same_rounds(actor: Any, plan: Plan) -> None:
    agree(run(Decoder, actor, plan), run(DeviceDecoder, actor, plan))


def test_the_same_with_a_kept_cache_and_with_stop_conditions(world: Any, actor: Any) -> None:
    plan = Plan([5, 4, 3, 4], [3, 4, 2], {1})
    kept = replace(SETTINGS, keeps_cache=True)
    agree(run(Decoder, actor, plan, kept), run(DeviceDecoder, actor, plan, kept))
    one, other = (run(kind, actor, plan, SETTINGS, StopConditions([5, 9], [], None)) for kind in (Decoder, DeviceDecoder))
    assert any(s.stopped for s in one[1])
    agree(one, other)


@pytest.mark.parametrize(("first", "second"), [(Decoder, DeviceDecoder), (DeviceDecoder, Decoder)])
def test_either_decoder_resumes_a_checkpoint_of_the_other(actor: Any, first: type[Decoder], second: type[Decoder]) -> None:
    ends = []
    for kinds in ((first, first), (first, second)):
        some = [Sequence(n, 0, prompt(n)) for n in range(7)]
        decoder = kinds[0](actor, SETTINGS, SLOTS)
        decoder.begin(some)
        for _ in range(9):
            decoder.round(0)
        assert 0 < len(decoder.live) < 7, "some should have left"
        other = moved(decoder, kinds[1](actor, SETTINGS, SLOTS), 0)
        while other.live:
            other.round(1)
        ends.append([(s.response, s.token_versions, s.ending) for s in some])
    assert ends[0] == ends[1]


def test_a_decoder_continues_after_saving(actor: Any, tmp_path: Path) -> None:
    responses = []
    for saves in (False, True):
        some = [Sequence(n, 0, prompt(n)) for n in range(6)]
        decoder = DeviceDecoder(actor, replace(SETTINGS, keeps_cache=True), SLOTS)
        decoder.begin(some)
        while decoder.live:
            decoder.round(0)
            if saves and decoder.live:
                decoder.save(tmp_path)
        responses.append([s.response for s in some])
    assert responses[0] == responses[1]


def test_rounds_shrink_to_the_next_row_shape(actor: Any) -> None:
    decoder = DeviceDecoder(actor, SETTINGS, SLOTS)
    decoder.begin([Sequence(n, 0, prompt(n)) for n in range(9)])
    widths = {decoder._width}
    while decoder.live:
        decoder.round(0)
        widths.add(decoder._width)
        assert len(decoder.live) <= decoder._width
    assert widths <= {1, 2, 4, 8, 9}
    assert len(widths) > 2


def test_a_round_does_not_synchronize() -> None:
    assert waiting_calls(DeviceDecoder._advance_rows) == []
    assert waiting_calls(DeviceDecoder._launch) == []


def test_sampling_filters_select_the_host_decoder(actor: Any) -> None:
    assert type(build_decoder(actor, SETTINGS, SLOTS)) is Decoder, "on a CPU"
    with pytest.raises(ValueError, match="filters"):
        DeviceDecoder(actor, replace(SETTINGS, filters=Filters(5, None, None)), SLOTS)


def test_without_a_gpu_no_graph_is_captured() -> None:
    def run(rows: int, columns: int) -> None:
        pass

    assert graphed_if_cuda(run, torch.zeros(1), torch.nn.Linear(1, 1)) is run


def test_a_whole_run_trains_the_same(world: Any, tmp_path: Path) -> None:
    spec = world.spec({"steps": 2})
    plain = world.run(spec, tmp_path / "plain")
    engine = world.assemble(spec, tmp_path / "device")
    own = engine.decoder
    engine.decoder = DeviceDecoder(own.actor, own.settings, own.cache.slots)
    with world.recorded() as steps:
        train(engine, lambda: False)
    engine.scorers.close()
    engine.journal.close()
    assert [step.tokens for step in steps] == [step.tokens for step in plain.steps]
    for name, weight in plain.weights("actor").items():
        torch.testing.assert_close(weight, world.weights(tmp_path / "device", "actor")[name], rtol=0, atol=1e-9)


class Captured:
    """Fake `torch.cuda.CUDAGraph`: work run during capture takes effect only on replay."""

    def __init__(self) -> None:
        self.replay: Callable[[], None] = lambda: None


class Gpu:
    """Fake GPU for capture: `run` adds to `counter`, and captures of `refused` shapes fail."""

    def __init__(self, refused: tuple[tuple[int, int], ...] = ()) -> None:
        self.counter = torch.zeros(4, dtype=torch.long)
        self.network = torch.nn.Linear(1, 1)
        self.refused = refused
        self.captured: list[tuple[int, int]] = []
        self.asked = (0, 0)

    def run(self, rows: int, columns: int) -> None:
        self.asked = rows, columns
        self.counter[:rows] += columns

    @contextmanager
    def graph(self, made: Captured, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "the scorers' thread keeps running"
        before = self.counter.clone()
        yield
        self.counter.copy_(before)
        shape = self.asked
        if shape in self.refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured.append(shape)
        made.replay = lambda: self.run(*shape)

    @contextmanager
    def present(self) -> Iterator[CudaGraphs]:
        """Context manager that patches torch's CUDA functions."""
        with (
            mock.patch.object(torch.cuda, "graph_pool_handle", return_value=None),
            mock.patch.object(torch.cuda, "current_stream", return_value=None),
            mock.patch.object(torch.cuda, "Stream"),
            mock.patch.object(torch.cuda, "CUDAGraph", Captured),
            mock.patch.object(torch.cuda, "graph", self.graph),
        ):
            yield CudaGraphs(self.run, self.counter, self.network)


def test_each_shape_is_captured_once_and_warm_up_restores_the_state() -> None:
    gpu = Gpu()
    with gpu.present() as rounds:
        for rows, columns in ((4, 8), (4, 8), (2, 8), (4, 8)):
            rounds(rows, columns)
        assert gpu.captured == [(4, 8), (2, 8)]
        assert gpu.counter.tolist() == [32, 32, 24, 24]
        rounds.refresh()
        rounds(2, 8)
        assert gpu.captured == [(4, 8), (2, 8)]
        gpu.network.weight = torch.nn.Parameter(torch.ones(1, 1))
        rounds.refresh()
        rounds(2, 8)
        assert gpu.captured == [(4, 8), (2, 8), (2, 8)]


def test_a_failed_capture_falls_back_to_eager_launches_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu(refused=((2, 8),))
    with gpu.present() as rounds:
        for rows, columns in ((4, 8), (2, 8), (4, 8), (2, 8)):
            rounds(rows, columns)
    assert gpu.captured == [(4, 8)]
    assert gpu.counter.tolist() == [32, 32, 16, 16]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be captured as a CUDA graph: operation not permitted" in caplog.text

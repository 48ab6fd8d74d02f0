"""Whole runs with vLLM as decoder or reward server, with fakes of vLLM's engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from oppo_contract.model_folder import ModelFolderError
from oppo_core.engine import build as engine_module
from oppo_core.models.model_io import load_model
from oppo_core.rewards.build import RewardBuilder
from oppo_core.rewards.vllm_model import POOLING, PrefixReward
from oppo_core.rollout.decoder import DecoderProtocol
from oppo_core.vllm.asyncio_thread import AsyncioThread
from tests.fakes.vllm_async_engine import streaming
from tests.fakes.vllm_pooling_engine import BLOCK, FakePoolingEngine

STEPS = 3
ENDED = "VllmError: vLLM failed at beginning a weight update: EngineDead: the engine's process has ended"
SMALL = {"steps": STEPS, "ppo": {"tis": "all"}, "rollout": {"max_new_tokens": 40}, "overlap": {"intra_step": "off"}}


def apart(
    made: list[DecoderProtocol], network: Any, settings: Any, slots: int, stops: Any, sleeps: bool = False
) -> DecoderProtocol:  # fmt: skip
    made.append(streaming(network, settings, stops, interval=4, handles=False, sleeps=sleeps))
    return made[-1]


@contextmanager
def decoded_by(build_decoder: Any) -> Iterator[None]:
    """Within it, engines are given this decoder."""
    with mock.patch.object(engine_module, "build_decoder", build_decoder):
        yield


def tokens_of(run: Any) -> list[list[tuple[int, list[int], list[int]]]]:
    """A step's trained answers: number, tokens and the versions of the weights that sampled them."""
    return [[(s.sequence_id, s.response, s.token_versions) for s in step.experience.sequences] for step in run.steps]


@pytest.mark.full
@pytest.mark.parametrize("inter_step", ["off", "defer", "tail_batch"])
def test_an_engine_that_sleeps_between_steps_trains_each_answer_once(world: Any, tmp_path: Path, inter_step: str) -> None:
    made: list[DecoderProtocol] = []
    with decoded_by(partial(apart, made, sleeps=True)):
        run = world.run(world.spec(SMALL, {"overlap": {"inter_step": inter_step}}), tmp_path)
    for decoder in made:
        decoder.close()
    whole = [sequence for step in tokens_of(run) for sequence in step]
    assert len({number for number, _, _ in whole}) == len(whole) == 6 * STEPS
    for version, step in enumerate(tokens_of(run)):
        for _, response, versions in step:
            assert len(versions) == len(response)
            assert versions == sorted(versions)
            assert set(versions) == {version} or inter_step == "defer"


@pytest.mark.full
@pytest.mark.parametrize("inter_step", ["off", "defer", "tail_batch"])
def test_an_engine_that_goes_on_meanwhile_loses_nothing(world: Any, tmp_path: Path, inter_step: str) -> None:
    made: list[DecoderProtocol] = []
    spec = world.spec(SMALL, {"overlap": {"inter_step": inter_step}, "checkpoints": {"every_steps": 1}})
    try:
        with decoded_by(partial(apart, made)):
            first = world.run(spec, tmp_path / "first", stop_after=2)
            rest = world.run(spec, tmp_path / "rest", resume=tmp_path / "first" / "checkpoints" / "step-00000002")
    finally:
        for decoder in made:
            decoder.close()
    trained = [sequence for run in (first, rest) for step in tokens_of(run) for sequence in step]
    assert len({number for number, _, _ in trained}) == len(trained) == 6 * STEPS
    for version, step in enumerate([*tokens_of(first), *tokens_of(rest)]):
        for _, response, versions in step:
            assert len(versions) == len(response)
            assert versions == sorted(versions)
            assert max(versions) <= version
            assert set(versions) == {version} or inter_step == "defer"


@pytest.mark.full
@pytest.mark.parametrize("dies", [False, True])
def test_engine_is_released_however_a_run_ends(world: Any, tmp_path: Path, dies: bool) -> None:
    made: list[DecoderProtocol] = []

    def mortal(*given: Any) -> DecoderProtocol:
        decoder: Any = apart(made, *given)
        plain, rests = decoder.pause, iter(range(STEPS))

        def rest() -> None:
            plain()
            if dies and next(rests) == 1:
                decoder._loop.run(decoder.engine.die(), "dying")

        decoder.pause = rest
        return made[-1]

    with decoded_by(mortal):
        status, events = world.main(world.tree(SMALL), tmp_path)
    last = events[-1]
    assert (status, last.outcome) == ((1, "failed") if dies else (0, "succeeded"))
    assert not dies or last.reason == ENDED
    assert not [thread for thread in threading.enumerate() if thread.name == "oppo-vllm"]


def test_an_engine_that_is_never_assembled_lets_its_decoder_go(world: Any, tmp_path: Path) -> None:
    made: list[Any] = []
    nowhere = world.spec(SMALL, {"models": {"reference": {"path": "gone"}}})
    with decoded_by(partial(apart, made)), pytest.raises(ModelFolderError):
        world.assemble(nowhere, tmp_path)
    assert [decoder.engine.dead for decoder in made] == [True]
    assert not [thread for thread in threading.enumerate() if thread.name == "oppo-vllm"]


def served(builder: RewardBuilder, model: Any, memory_share: float) -> PrefixReward:
    network = load_model(model, "scalar", builder.roots, builder.dtype, 0)
    return PrefixReward(FakePoolingEngine(network), AsyncioThread(20.0), BLOCK, parameters=lambda: dict(POOLING))


@pytest.mark.full
@pytest.mark.parametrize("intra_step", ["off", "per_sequence", "per_chunk"])
def test_a_reward_that_vllm_serves_is_the_reward_that_is_streamed(world: Any, tmp_path: Path, intra_step: str) -> None:
    overlap = {"overlap": {"intra_step": intra_step}}
    plain = world.run(world.spec({"steps": STEPS}, overlap), tmp_path / "plain", threads=2, inline=True)
    # float64, which vLLM has not, so that rounding hides nothing
    spec = world.spec({"steps": STEPS}, overlap)
    source = spec.models.reward.model_copy(update={"served_by": "vllm"})
    spec = spec.model_copy(update={"models": spec.models.model_copy(update={"reward": source})})
    with mock.patch.object(RewardBuilder, "_served", served):
        run = world.run(spec, tmp_path / "served", threads=2, inline=True)
    told = [[event.metrics for event in each.events if event.kind == "step"] for each in (plain, run)]
    for ours, theirs in zip(*told, strict=True):
        for name in ("critic/score/mean", "actor/pg_loss"):
            assert theirs[name] == pytest.approx(ours[name], abs=1e-9)
    assert tokens_of(run) == tokens_of(plain)
    shares = [metrics["oppo/reward_cached_share"] for metrics in told[1] if "oppo/reward_cached_share" in metrics]
    assert bool(shares) == (intra_step == "per_chunk")
    assert set(shares) <= {1.0}

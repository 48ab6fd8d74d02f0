"""Whole runs that vLLM decodes for, where engines stand in for vLLM's: in the run's process, and one that goes on by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from oppo_core import engine as engine_module
from oppo_core.models.adapters import merged_weights
from oppo_core.rollout.decoder import Decoding
from oppo_core.vllm.inprocess import InProcessDecoder
from oppo_core.vllm.standin import StandInEngine
from oppo_core.vllm.standin_async import streaming

STEPS = 3
SMALL = {"steps": STEPS, "ppo": {"tis": "all"}, "rollout": {"max_new_tokens": 40}, "overlap": {"intra_step": "off"}}


def in_process(network: nn.Module, settings: Any, slots: int, drafter: Any, stops: Any) -> Decoding:
    engine = StandInEngine(network)  # type: ignore[arg-type]
    return InProcessDecoder(engine, settings, lambda: merged_weights(network).items(), stops, parameters=dict, sleeps=True)


def apart(made: list[Decoding], network: Any, settings: Any, slots: int, drafter: Any, stops: Any) -> Decoding:
    made.append(streaming(network, settings, stops, interval=4, handles=False, sleeps=False))
    return made[-1]


@contextmanager
def decoded_by(decoder_of: Any) -> Iterator[None]:
    """Within it, engines are given this decoder."""
    with mock.patch.object(engine_module, "decoder_of", decoder_of):
        yield


def tokens_of(run: Any) -> list[list[tuple[int, list[int], list[int]]]]:
    """A step's trained answers: number, tokens and the versions of the weights that sampled them."""
    return [[(s.sequence_id, s.response, s.token_versions) for s in step.experience.sequences] for step in run.steps]


@pytest.mark.full
@pytest.mark.parametrize("inter_step", ["off", "defer", "tail_batch"])
def test_an_engine_that_sleeps_between_steps_trains_each_answer_once(world: Any, tmp_path: Path, inter_step: str) -> None:
    with decoded_by(in_process):
        run = world.run(world.spec(SMALL, {"overlap": {"inter_step": inter_step}}), tmp_path)
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
    made: list[Decoding] = []
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

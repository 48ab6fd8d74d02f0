"""Scorers on a GPU of their own: where things are put and what is planned there. What a GPU computes is not tried here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from oppo_contract.sections.training import PLAIN_TRAINING
from oppo_core.engine import preflight as looked
from oppo_core.engine.layout import build_layout, scoring_device, select_device
from oppo_core.engine.preflight import Findings, preflight
from oppo_core.engine.state import Engine, Progress
from oppo_core.scoring.build import build_scorers
from oppo_core.scoring.scorers import SequenceDelta
from oppo_core.trace.recorder import Recorder
from oppo_core.update.strategies import PlainUpdate

ADAPTED = {"models": {"lora": {"rank": 2, "alpha": 4}}}
TWO = {"resources": {"devices": 2, "scoring_devices": 1}}
FOUR = {"resources": {"devices": 4, "scoring_devices": 2}}
NOWHERE = torch.device("meta")
GPU = 80 * 2**30


def test_ranks_train_on_the_first_gpus_and_score_behind_them(world: Any) -> None:
    spec = world.spec(FOUR)
    actors = [torch.device("cuda", number) for number in (0, 1)]
    assert [str(scoring_device(spec, actor)) for actor in actors] == ["cuda:2", "cuda:3"]
    layout = build_layout(spec, actors[1], 4, 16, lambda name: f"node1/{name}")
    assert layout.apart
    assert layout.streams
    assert layout.lanes() == [
        ("node1/cuda:1", "actor"), ("node1/cuda:3", "reward"), ("node1/cuda:3", "reference"), ("node1/cuda:3", "critic"),
    ]  # fmt: skip
    assert layout.devices == ["node1/cuda:1", "node1/cuda:3"]


def test_without_one_all_roles_share_a_device(world: Any) -> None:
    spec, actor = world.spec(), torch.device("cuda", 1)
    assert scoring_device(spec, actor) == actor
    layout = build_layout(spec, actor, 4, 16)
    assert (layout.devices, layout.apart) == (["cuda:1"], False)
    assert scoring_device(world.spec(FOUR), torch.device("cpu")) == torch.device("cpu")


def test_the_gpus_must_be_there(world: Any) -> None:
    with mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 2, current_device=lambda: 0):
        assert select_device(world.spec(TWO)) == torch.device("cuda", 0)
        with pytest.raises(looked.LayoutError, match="gives each node 4 devices, but torch sees 2 GPUs"):
            select_device(world.spec(FOUR))


def test_everything_that_reads_and_learns_there_is_there(world: Any) -> None:
    """On torch's `meta` device mixing in anything of the actor's, which is elsewhere, is an error."""
    spec = world.spec(TWO, ADAPTED)
    scorers = build_scorers(spec, [world.folder], NOWHERE, None, None, None, None, False, Recorder(("meta",)))
    networks = [scorers.reference.network, scorers.trainer.network, scorers.reward.streams[0].network]
    assert {weight.device for network in networks for weight in network.parameters()} == {NOWHERE}
    scorers.begin([SequenceDelta(n, 5, np.arange(3, 8 + n), False) for n in range(3)])
    scorers.extend([SequenceDelta(0, 5, np.arange(3, 5), True), SequenceDelta(2, 5, np.arange(3, 9), False)], 1)
    assert [len(logp) for logp in scorers.sequences[2].reference_logprobs] == [2, 6]
    assert scorers.reward._streamed[0, 0].device == NOWHERE
    scorers.close()


@pytest.mark.parametrize(("in_turn", "apart"), [(False, False), (True, False), (True, True)])
def test_the_critic_is_trained_first_where_two_sums_of_a_gpu_could_block_each_other(
    in_turn: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("oppo_core.update.strategies.compute_experience", lambda *_: (SimpleNamespace(sequences=[]), {}))
    monkeypatch.setattr("oppo_core.update.strategies.build_critic_update", lambda *_: None)
    scorers = SimpleNamespace(
        start_critic_update=lambda _: told.append("begin"), wait_critic_update=lambda: told.append("critic") or {"critic/lr": 1.0}
    )  # fmt: skip
    engine: Any = SimpleNamespace(
        ranks=SimpleNamespace(serialize_reductions=in_turn), scorers=scorers, trace=Recorder(("cpu:0",)), progress=Progress(),
        layout=SimpleNamespace(apart=apart), spec=SimpleNamespace(training=PLAIN_TRAINING),
        actor=SimpleNamespace(update=lambda *_: told.append("actor") or {"actor/lr": 2.0}),
    )  # fmt: skip
    engine.serialize_updates = Engine.serialize_updates.fget(engine)  # type: ignore[attr-defined]
    _, metrics = PlainUpdate().train_batch(engine, [], 0)
    assert told == ["begin", *(("critic", "actor") if in_turn and not apart else ("actor", "critic"))]
    assert metrics == {"actor/lr": 2.0, "critic/lr": 1.0}


def told_of_two(world: Any, free: dict[int, int], *changes: Any) -> Findings:
    """What preflight would find where two GPUs have so many bytes free."""
    with (
        mock.patch.object(looked, "select_device", return_value=torch.device("cuda", 0)),
        mock.patch.object(torch.cuda, "mem_get_info", lambda device: (free[device.index], GPU)),
    ):
        return preflight(world.spec(TWO, *changes), [world.folder])


def test_memory_is_planned_for_each_gpu(world: Any, tmp_path: Path) -> None:
    findings = told_of_two(world, {0: GPU, 1: GPU}, ADAPTED)
    assert findings.errors == []
    actor, scorers = ({item.name for item in device.items} for device in findings.memory)
    assert actor & scorers == {"the GPU's libraries"}
    assert {"actor: weights", "actor: keys and values", "actor: sampling"} <= actor
    assert {"critic: optimizer", "reward 1: keys and values", "reference: weights"} <= scorers
    assert not any(name.startswith("actor") for name in scorers)


def test_the_gpu_that_is_too_small_is_named(world: Any) -> None:
    (error,) = told_of_two(world, {0: GPU, 1: 1000}).errors
    assert "memory of cuda:1" in str(error)
    assert "critic" in str(error)
    assert [str(error).split("memory of ")[1][:6] for error in told_of_two(world, {0: 1, 1: 1}).errors] == ["cuda:0", "cuda:1"]

"""Without a critic the scorers' cores are idle while the actor is trained, so it uses them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oppo_core.engine.layout import build_layout

CPU = torch.device("cpu")
GROUPS: dict[str, Any] = {
    "ppo": {"algorithm": "grpo", "group_size": 3, "batch_size": 2, "critic_learning_rate": 1e-5}, "models": {"critic": "actor"},
    "overlap": {"overcommit": {"initial": 1, "max": 2}},
}  # fmt: skip
SEQUENTIAL: dict[str, Any] = {"overlap": {"intra_step": "off", "inter_step": "off", "overcommit": {"initial": 1, "max": 2}}}


def test_the_actor_is_trained_on_the_scorers_cores_only_where_no_critic_is(world: Any) -> None:
    grpo, ppo = world.spec(GROUPS), world.spec()
    layout = build_layout(grpo, CPU, 5, 16)
    assert (layout.actor_devices, layout.idle_in_training) == (("cpu:0", "cpu:1", "cpu:2"), ("cpu:3", "cpu:4"))
    assert (layout.cores(2), layout.cores(5)) == (("cpu:0", "cpu:1"), tuple(layout.devices))
    assert layout.streams
    assert build_layout(ppo, CPU, 5, 16).idle_in_training == ()
    assert build_layout(grpo, CPU, 1, 16).idle_in_training == ()
    assert build_layout(world.spec(GROUPS, SEQUENTIAL), CPU, 5, 16).idle_in_training == ()
    assert build_layout(grpo, torch.device("cuda", 1), 5, 16).idle_in_training == ()


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_the_actor_is_trained_on_all_cores_and_decodes_on_its_own(world: Any, tmp_path: Path, nonfinite: str) -> None:
    run = world.run(world.spec(GROUPS, {"ppo": {"on_nonfinite": nonfinite}}), tmp_path, threads=2)
    assert len(run.steps) == 4
    for spans in (event for event in run.events if event.kind == "spans"):
        devices = {phase: set[str]() for phase in spans.phase}
        for device, phase in zip(spans.device, spans.phase, strict=True):
            devices[phase].add(device)
        assert devices["actor-forward"] == devices["update-actor"] == {"cpu:0", "cpu:1"}
        assert devices["decode"] == devices["actor-prefill"] == {"cpu:0"}
        assert devices["reference-prefill"] == {"cpu:1"}
    assert run.engine.trace.devices == ("cpu:0",)

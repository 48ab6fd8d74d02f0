"""Empty settings are chosen at the start, recorded, and kept by a resumed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oppo_contract import chosen_defaults


def test_the_value_is_recorded_and_a_resumed_run_keeps_it(world: Any, tmp_path: Path, monkeypatch: Any) -> None:
    tree = world.tree({"steps": 1, "overlap": {"intra_step": "off", "chunk": {"size": None}}})
    del tree["ppo"]["learning_rate"], tree["ppo"]["critic_learning_rate"]
    status, events = world.main(tree, tmp_path / "run")
    assert status == 0, events[-1]
    lines = [line for event in events if event.kind == "log" for line in event.lines]
    assert any(line.startswith("ppo.learning_rate is empty; it is 0.0003, because all weights of a model with") for line in lines)
    assert any(line.startswith("overlap.chunk.size is empty; it is 16, because a quarter of") for line in lines)
    (step,) = [event.metrics for event in events if event.kind == "step"]
    assert (step["actor/lr"], step["critic/lr"], step["oppo/chunk_size"]) == (3e-4, 1e-3, 16)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    saved = json.loads((checkpoint / "state.json").read_text())["spec"]
    assert (saved["ppo"]["learning_rate"], saved["overlap"]["chunk"]["size"]) == (3e-4, 16)
    monkeypatch.setattr(chosen_defaults, "MAX_FULL_RATE", 1e-5)  # another rule, as of a later version
    status, events = world.main(tree | {"steps": 2}, tmp_path / "more", "--resume-from", checkpoint)
    assert status == 0, events[-1]
    assert [event.metrics["actor/lr"] for event in events if event.kind == "step"] == [3e-4]

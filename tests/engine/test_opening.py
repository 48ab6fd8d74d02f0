"""Before the first hand-over of a step the scorers have nothing to do, and with update overlap the actor has all cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oppo_core.engine import layout
from oppo_core.engine.layout import lay_out
from oppo_core.update import work_split

UPDATE = {"steps": 6, "overlap": {"update_overlap": True, "chunk": {"size": 4}}}
# The same shift of all keys changes nothing, so the gradient of their biases is rounding alone: it differs with the number of
# threads, and Adam divides it by its epsilon of 1e-8.
KEY_BIASES, ATOL_OF_KEY_BIASES = "qkv.bias", 1e-9


def test_only_update_overlap_on_wide_networks_opens_with_all_cores(world: Any) -> None:
    cpu = torch.device("cpu")
    wide = lay_out(world.spec(UPDATE), cpu, 4, 128)
    assert (wide.prefill_threads, wide.threads_after(0), wide.threads_after(1)) == (4, 4, 2)
    assert wide.cores(4) == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert wide.cores(2) == wide.actor_devices == ("cpu:0", "cpu:1")
    assert ("cpu:3", "actor") in wide.lanes()
    for plain in (lay_out(world.spec(UPDATE), cpu, 4, 64), lay_out(world.spec({"steps": 6}), cpu, 4, 128)):
        assert (plain.prefill_threads, plain.threads_after(0), plain.threads_after(1)) == (2, 2, 2)
        assert [device for device, role in plain.lanes() if role == "actor"] == ["cpu:0", "cpu:1"]


def test_a_run_that_opens_with_all_cores_learns_the_same(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_split, "SMALLEST_PASS_TOKENS", 20)
    plain = world.run(world.spec(UPDATE), tmp_path / "plain", threads=2)
    monkeypatch.setattr(layout, "DECODE_THREADS_FROM_HIDDEN", 1)
    opened = world.run(world.spec(UPDATE), tmp_path / "opened", threads=2)
    assert [step.tokens for step in opened.steps] == [step.tokens for step in plain.steps]
    for role in ("actor", "critic"):
        for name, weight in plain.weights(role).items():
            atol = ATOL_OF_KEY_BIASES if name.endswith(KEY_BIASES) else 1e-12
            torch.testing.assert_close(opened.weights(role)[name], weight, rtol=1e-9, atol=atol)
    spans = [event for event in opened.events if event.kind == "spans"]
    assert len(spans) == UPDATE["steps"]
    for event in spans:
        decoded = [
            (d, chunk) for d, phase, chunk in zip(event.device, event.phase, event.chunk, strict=True) if phase == "decode"
        ]
        assert {device for device, chunk in decoded if chunk == 1} == {"cpu:0", "cpu:1"}
        assert {device for device, chunk in decoded if chunk > 1} <= {"cpu:0"}
    for event in (event for event in opened.events if event.kind == "step"):
        for device in ("cpu:0", "cpu:1"):  # the lent core's time is not counted twice
            assert event.metrics[f"busy/{device}"] + event.metrics[f"bubble/{device}"] == pytest.approx(1)

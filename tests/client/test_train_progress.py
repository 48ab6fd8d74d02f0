"""What `oppo train` prints while a run starts and trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from oppo_cli.train import Lines, step_text

SPEC = {
    "name": "small", "steps": 3, "models": {"actor": {"tiny": {}}, "reward": {"model": {"tiny": {}}}},
    "data": {"prompts": "prompts.jsonl"}, "ppo": {"batch_size": 2, "mini_batches": 1},
    "overlap": {"intra_step": "off", "inter_step": "off", "overcommit": {"max": 2, "initial": 1}},
    "evaluation": {"prompts": "prompts.jsonl", "every_steps": 2, "count": 2},
    "rollout": {"max_new_tokens": 8, "max_prompt_tokens": 24}, "resources": {"kind": "cpu"},
}  # fmt: skip


def test_a_steps_line_has_its_own_seconds_and_the_held_out_score() -> None:
    assert step_text({"critic/score/mean": 0.5, "timing_s/step": 8.06}) == "reward 0.500  8.1 s/step"
    assert step_text({"timing_s/step": 2, "eval/score/mean": 0.25}) == "reward –  2.0 s/step  held out 0.250"


def test_a_line_every_five_seconds_and_for_each_evaluation(capsys) -> None:  # type: ignore[no-untyped-def]
    lines = Lines(9)
    for step in range(1, 10):
        lines.show(step, {"critic/score/mean": 0.1, "timing_s/step": 1.0} | ({"eval/score/mean": 0.2} if step == 4 else {}))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown] == ["1/9", "4/9", "9/9"]
    assert shown[1] == "step 4/9  reward 0.100  1.0 s/step  held out 0.200"


def test_train_says_at_once_what_it_does_and_then_what_it_loads(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": [3, 4, n]}) + "\n" for n in range(3, 9)))
    (tmp_path / "spec.yaml").write_text(json.dumps(SPEC))
    command = [sys.executable, "-m", "oppo_cli", "train", "spec.yaml", "--out", "run", "--root", ".", "--threads", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as train:
        assert train.stdout is not None
        first = train.stdout.readline()
        assert first == "small: 3 steps. Starting the engine; events are in run/events.jsonl.\n"
        assert not (tmp_path / "run" / "events.jsonl").exists(), "the engine, which imports torch, has not started"
        rest = train.stdout.read()
    assert train.returncode == 0, rest
    for words in ("Loading actor: built-in, random weights", "Loading reward 1:", "s/step", "held out"):
        assert words in rest

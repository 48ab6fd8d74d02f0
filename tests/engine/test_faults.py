"""What goes wrong ends the engine soon, with status 1 and a last event that names the cause, and leaves no process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.processes import gone

pytestmark = pytest.mark.usefixtures("spawned_scorers")

OPPO = {"overlap": {"intra_step": "per_chunk", "inter_step": "defer"}, "steps": 10_000, "resources": {"dtype": "float32"}}
SHORT = {"steps": 2, "overlap": {"intra_step": "off"}}


def failure(world: Any, out: Path, *changes: Any, threads: int = 1) -> str:
    """Run in this process, expect status 1; returns the reason in the last event."""
    status, events = world.main(world.tree(SHORT, *changes), out, threads=threads)
    assert status == 1
    assert (events[-1].kind, events[-1].outcome) == ("finished", "failed")
    return str(events[-1].reason)


def scorers_of(engine: Any) -> psutil.Process:
    """The scorers' process."""
    below = psutil.Process(engine.process.pid).children()
    return next(process for process in below if any("spawn_main" in word for word in process.cmdline()))


@pytest.fixture
def streaming(world: Any, tmp_path: Path) -> Any:
    """A streaming engine in a process of its own, some steps into its run, and the processes below it."""
    engine = world.start(world.tree(OPPO), tmp_path, threads=2)
    engine.step(3)
    return engine, psutil.Process(engine.process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    _, left = psutil.wait_procs(processes, timeout=60)
    return all(map(gone, left))


@pytest.mark.full
def test_a_killed_scorer_process_ends_the_run_and_is_named(streaming: Any) -> None:
    engine, below = streaming
    scorers_of(engine).kill()
    status, errors = engine.end()
    assert status == 1
    last = engine.events[-1]
    assert (last.kind, last.outcome) == ("finished", "failed")
    assert "the scorer process died with status -9" in last.reason or "closed its end" in last.reason
    assert "ScorerError" in errors
    assert last.step == max(event.step for event in engine.events if event.kind == "step")
    assert all_gone(below)


def test_engine_and_scorers_end_with_their_parent(streaming: Any) -> None:
    engine, below = streaming
    engine.cut_lifeline()
    assert engine.end()[0] == 137
    assert all_gone(below)


ENGINE_OF_OTHERS = """
import subprocess, sys, threading
from oppo_core.cli import _exit_with_parent
looks_after_nobody = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"], start_new_session=True)
tracker = subprocess.Popen(["sh", "-c", "cat; echo sent > $1", "oppo_core.trackers", sys.argv[1]], stdin=subprocess.PIPE)
print(looks_after_nobody.pid, tracker.pid, flush=True)
_exit_with_parent()
threading.Event().wait()
"""


def test_child_processes_end_with_the_engine_but_trackers_finish_sending(tmp_path: Path) -> None:
    reading, lifeline = os.pipe()
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE_OF_OTHERS, str(tmp_path / "told")], stdout=subprocess.PIPE, text=True,
        pass_fds=(reading,), env=os.environ | {"OPPO_LIFELINE_FD": str(reading)},
    )  # fmt: skip
    os.close(reading)
    with engine:
        assert engine.stdout is not None
        below = [psutil.Process(int(pid)) for pid in engine.stdout.readline().split()]
        below += below[0].children()
        os.close(lifeline)
        assert engine.wait(60) == 137
    assert all_gone(below)
    assert (tmp_path / "told").read_text() == "sent\n"


@pytest.mark.parametrize("part", ["engine", "scorers"])
def test_a_native_crash_leaves_its_stack_in_the_log(streaming: Any, part: str) -> None:
    engine, below = streaming
    os.kill(engine.process.pid if part == "engine" else scorers_of(engine).pid, signal.SIGSEGV)
    status, log = engine.end()
    assert status == (-signal.SIGSEGV if part == "engine" else 1)
    assert "Fatal Python error: Segmentation fault" in log
    assert "most recent call first" in log
    assert all_gone(below)


def test_open_file_limit_is_raised_to_the_hard_limit() -> None:
    program = (
        "import resource as r; from oppo_contract.machine import raise_open_file_limit as up\n"
        "for soft, hard in ((200, 900), (300, 300)):\n"
        "    r.setrlimit(r.RLIMIT_NOFILE, (soft, hard)); up(); print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["900", "900", "300", "300"]


@pytest.mark.full
def test_a_scorer_process_that_is_asked_to_end_goes_on(streaming: Any) -> None:
    """SIGTERM and Ctrl-C reach the whole process group; only the engine decides what they mean."""
    engine, below = streaming
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(scorers_of(engine).pid, number)
    told = max(event.step for event in engine.events if event.kind == "step")
    engine.step(told + 3)
    engine.process.send_signal(signal.SIGINT)
    assert engine.end()[0] == 0
    assert engine.events[-1].outcome == "stopped"
    assert all_gone(below)


@pytest.mark.parametrize("intra", ["off", "per_chunk"])
def test_a_reward_that_is_no_number_is_named_before_it_harms_the_weights(world: Any, tmp_path: Path, intra: str) -> None:
    changes = {"models": {"reward": {"model": {"path": "nan-reward"}}}, "overlap": {"intra_step": intra}}
    reason = failure(world, tmp_path, changes)
    assert reason.startswith("NonFiniteError: the score of sequence")
    assert "nan" in reason
    assert not (tmp_path / "checkpoints").exists()


def test_a_loss_that_explodes_is_named(world: Any, tmp_path: Path) -> None:
    """Scores so large that their square is no float32."""
    folder = tmp_path / "huge"
    shutil.copytree(world.folder / "reward", folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"head.weight": weights["head.weight"] * 1e25}, folder / "model.safetensors")
    changes = {"models": {"reward": {"model": {"path": str(folder)}}}, "resources": {"dtype": "float32"}}
    reason = failure(world, tmp_path / "out", changes)
    assert reason.startswith("NonFiniteError: the value loss is inf at step 1")
    assert not (tmp_path / "out" / "checkpoints").exists()


RULE = {"model": None, "rule": "letters:score"}
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "missing actor": ({"models": {"actor": {"path": "nowhere"}}}, ["ModelFolderError", "nowhere does not exist"]),
    "missing reward model": ({"models": {"reward": {"model": {"path": "lost"}}}}, ["ModelFolderError", "lost does not exist"]),
    "missing prompts": ({"data": {"prompts": "lost.jsonl"}}, ["lost.jsonl does not exist"]),
    "another tokenizer": ({"models": {"reward": {"model": {"path": "other-tokens"}}}}, ["ModelFolderError", "tokenizer differs"]),
    "context too small": ({"rollout": {"max_new_tokens": 85}}, ["context is 96 tokens", "is 97", "max_new_tokens"]),
    "prompt too long": (
        {"rollout": {"max_prompt_tokens": 11}},
        ["PromptError", "prompts.jsonl, line 10", "has 12 tokens", "is 11"],
    ),
    "no such key": ({"data": {"prompt_field": "text"}}, ["PromptError", "line 1", "'text'", "it has prompt"]),
    "unknown rule": (
        {"models": {"reward": {"model": None, "rule": "letters:best"}, "critic": "actor"}},
        ["no rule letters:best"],
    ),
    "unknown rule module": (
        {"models": {"reward": {"model": None, "rule": "os:getcwd"}, "critic": "actor"}},
        ["no rule os:getcwd"],
    ),
}


def bare(tree: Any) -> Any:
    """The spec without keys set to None, which a merge cannot remove."""
    reward = tree["models"]["reward"]
    tree["models"]["reward"] = {key: value for key, value in reward.items() if value is not None}
    return tree


@pytest.mark.parametrize("name", BAD)
def test_missing_or_incompatible_files_are_refused(world: Any, tmp_path: Path, name: str) -> None:
    changes, words = BAD[name]
    status, events = world.main(bare(world.tree(SHORT, changes)), tmp_path)
    assert status == 1
    assert [event.kind for event in events] == ["finished"]
    assert [word for word in words if word not in events[0].reason] == [], events[0].reason


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "it has list"),
        ('{"prompt": []}', "not empty"),
        ('{"prompt": [3, 40]}', "0 to 39"),
        ('{"prompt": [3, -1]}', "0 to 39"),
        ('{"prompt": 7}', "must be text"),
        ("", "holds no prompt"),
    ],
)
def test_a_bad_prompts_file_is_named_with_its_line(world: Any, tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": [3, 4]}}\n\n{line}\n' if line else "\n")
    reason = failure(world, tmp_path / "out", {"data": {"prompts": str(path)}})
    assert reason.startswith("PromptError: bad.jsonl")
    assert words in reason
    assert "line 3" in reason or not line


def test_a_failing_rule_is_told_with_its_own_words(world: Any, tmp_path: Path) -> None:
    """Random tokens name no form of letter: the rule raises, and the last event says what."""
    changes = {"models": {"reward": RULE, "critic": "actor"}}
    status, events = world.main(bare(world.tree(SHORT, changes)), tmp_path)
    assert status == 1
    assert events[-1].outcome == "failed"
    assert "names none of" in events[-1].reason


@pytest.mark.full
def test_a_fault_in_the_scorers_process_is_told_and_leaves_no_process(world: Any, tmp_path: Path) -> None:
    changes = {"models": {"reward": {"model": {"path": "lost"}}}}
    engine = world.start(world.tree(OPPO, changes), tmp_path, threads=2)
    status, errors = engine.end()
    assert status == 1, errors
    assert "lost does not exist" in engine.events[-1].reason


def test_a_refused_command_line_says_why_on_stderr(tmp_path: Path) -> None:
    for content in (b"{", b"\xff\xfe", json.dumps({"steps": 0, "nmae": "x"}).encode()):
        (tmp_path / "spec.json").write_bytes(content)
        command = [sys.executable, "-c", "import sys; from oppo_core.cli import main; sys.exit(main(sys.argv[1:]))"]
        command += ["--spec", tmp_path / "spec.json", "--out", tmp_path, "--events", tmp_path / "events.jsonl"]
        ended = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
        assert ended.returncode == 2
        assert "spec.json" in ended.stderr
        assert not (tmp_path / "events.jsonl").exists()
    assert "name" in ended.stderr

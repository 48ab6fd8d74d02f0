"""The command line: imports, errors and exit statuses."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from oppo_cli.demo import _Demo, is_transient
from oppo_cli.demo_figures import RunFigures, bench_document, run_figures, table_rows
from oppo_cli.examples import DEMO
from oppo_cli.home import Failure, Home, RunningPlatform
from oppo_cli.main import COMMANDS, main
from oppo_client import FieldProblem, Refused
from oppo_contract.presets import example_text
from oppo_contract.spec import load_spec
from oppo_contract.yaml_text import load_yaml
from oppo_platform.runs.preflight import NodeOffer, find_problems
from oppo_platform.runs.spec_patch import apply_changes

SPEC = """
name: tiny
steps: 6
models:
  actor: {tiny: {hidden: 16, layers: 1, heads: 2, context: 64, vocab: 259}}
  reward: {rule: "letters:score"}
  critic: actor
data: {prompts: prompts.jsonl}
ppo: {batch_size: 8}
rollout: {max_new_tokens: 16, max_prompt_tokens: 16}
overlap: {overcommit: {initial: 2, max: 4}, chunk: {size: 8}}
"""


def oppo(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_help_imports_neither_django_nor_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from oppo_cli.main import main;"
        "result = CliRunner().invoke(main, ['--help']); assert result.exit_code == 0, result.output;"
        "print(sorted({'django', 'torch', 'celery', 'httpx', 'psycopg', 'rich'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_itself(name: str) -> None:
    if name == "manage":  # passes --help on to Django
        pytest.skip("Django's own help")
    result = oppo(name, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_a_good_spec_is_valid_and_a_bad_one_is_refused_with_every_reason(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(SPEC)
    bad.write_text(SPEC.replace("steps: 6", "step: 6\nseed: -1"))
    assert oppo("spec", "check", str(good)).exit_code == 0
    refused = oppo("spec", "check", str(bad))
    assert refused.exit_code == 2
    assert "did you mean steps" in refused.output
    assert "seed" in refused.output


@pytest.mark.parametrize(
    ("content", "said"), [(b"\xff\xfe", "UTF-8"), (b"#" * 300_000, "bytes long"), (b"a: [", "not valid YAML"), (b"", "empty")]
)
def test_an_unreadable_spec_is_refused_in_words(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "spec.yaml"
    file.write_bytes(content)
    result = oppo("spec", "check", str(file))
    assert result.exit_code == 2
    assert said in result.output
    assert oppo("spec", "check", str(tmp_path / "nowhere.yaml")).exit_code == 2


def test_the_schema_and_the_examples_can_be_printed(tmp_path: Path) -> None:
    assert json.loads(oppo("spec", "schema").output)["title"] == "RunSpec"
    for name in ("sequential", "oppo"):
        file = tmp_path / f"{name}.yaml"
        file.write_text(oppo("spec", "example", name).output)
        assert oppo("spec", "check", str(file)).exit_code == 0


@pytest.mark.full
def test_train_runs_the_engine_alone_and_resumes(tmp_path: Path) -> None:
    spec, out = tmp_path / "spec.yaml", tmp_path / "out"
    spec.write_text(SPEC)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "note sea"}\n')
    first = oppo("train", str(spec), "--out", str(out), "--root", str(tmp_path))
    assert first.exit_code == 0, first.output
    assert "Succeeded at step 6" in first.output
    assert str(out / "checkpoints" / "step-00000006") in first.output
    steps = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in steps if event["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert oppo("train", str(spec), "--out", str(out), "--root", str(tmp_path)).exit_code == 2
    spec.write_text(SPEC.replace("steps: 6", "steps: 8"))
    checkpoint = out / "checkpoints" / "step-00000006"
    again = oppo("train", str(spec), "--out", str(out), "--root", str(tmp_path), "--resume-from", str(checkpoint))
    assert again.exit_code == 0, again.output
    assert "Succeeded at step 8" in again.output
    assert "steps: 6 → 8" in again.output  # the run's log


@pytest.mark.full
def test_train_starts_all_ranks_of_this_machine_and_ctrl_c_stops_them_together(tmp_path: Path) -> None:
    spec, out = tmp_path / "spec.yaml", tmp_path / "out"
    spec.write_text(SPEC.replace("steps: 6", "steps: 100000") + "resources: {kind: cpu, processes: 2}\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "note sea"}\n')
    command = [sys.executable, "-m", "oppo_cli", "train", str(spec), "--out", str(out), "--root", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as started:
        assert started.stdout is not None
        for line in started.stdout:
            if line.startswith("step "):
                break
        started.send_signal(signal.SIGINT)
        rest = started.stdout.read()
    assert started.returncode == 0, rest
    assert "Stopped at step" in rest
    (newest,) = (out / "checkpoints").iterdir()
    assert (newest / "rank-1" / "state.json").is_file()
    assert json.loads((out / "events.jsonl.process-1").read_text().splitlines()[-1])["outcome"] == "stopped"


def test_train_tells_what_the_engine_could_not_do(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    result = oppo("train", str(spec), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "prompts.jsonl" in result.output


def test_a_home_belongs_to_one_up_at_a_time(tmp_path: Path) -> None:
    first, second = Home(tmp_path), Home(tmp_path)
    running = RunningPlatform(1, "http://127.0.0.1:1", "postgresql://", "redis://")
    with first.locked():
        first.save_running(running)
        assert second.running() == running
        assert (tmp_path / "running.json").stat().st_mode & 0o077 == 0
        with pytest.raises(Failure, match="already runs"), second.locked():
            pass
    assert second.running() is None


def test_a_home_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPPO_HOME", str(tmp_path / "file" / "home"))
    result = oppo("up")
    assert result.exit_code == 1
    assert "OPPO_HOME" in result.output


def test_a_join_without_a_token_on_standard_input_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPPO_HOME", str(tmp_path))
    refused = CliRunner().invoke(main, ["worker", "join", "http://127.0.0.1:1", "-"], input="\n")
    assert refused.exit_code != 0
    assert "There is no join token on standard input." in refused.output


def test_a_worker_that_has_not_joined_is_told_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPPO_HOME", str(tmp_path))
    assert "oppo worker join" in oppo("worker", "run").output
    refused = oppo("worker", "join", "http://127.0.0.1:1", "token")
    assert refused.exit_code == 1
    assert "does not respond" in refused.output


def test_figures_leave_out_the_first_steps() -> None:
    told = {"bubble": 0.25, "occupancy": 0.5, "reward_last_tenth": 1.5, "deferred_share": 0.1, "step_s": 9.9, "wall_s": 9.9}
    compared = {"figures": {"1": told}, "time_to_target": {"1": {"step": 4, "elapsed_s": 14.0}}}
    elapsed = {1: 10.0, 2: 12.0, 3: 13.0, 4: 14.0, 5: 15.0}
    tokens = {1: 100.0, 2: 200.0, 3: 300.0, 4: 400.0, 5: 500.0}
    figures = run_figures(compared, 1, elapsed, tokens, warmup=3)
    assert figures.step_s == 1.0
    assert figures.us_per_token == 1e6 * 2 / 200
    assert (figures.wall_s, figures.time_to_target_s, figures.bubble, figures.reward) == (15.0, 14.0, 0.25, 1.5)
    short = run_figures(compared, 1, {1: 1.0}, {1: 1.0}, warmup=3)
    assert short.step_s is None


def test_the_bench_document_has_the_names_that_others_rely_on() -> None:
    slow = RunFigures(100.0, 1.0, 500.0, 60.0, 0.4, 0.2, 2.0, 0.0, 100)
    fast = RunFigures(50.0, 0.5, 250.0, None, 0.1, 0.6, 2.1, 0.2, 100)
    document = bench_document(slow, fast, {"seed": 0})
    names = {result["name"]: result for result in document["results"]}
    wanted = (
        "sequential/step_s",
        "oppo/step_s",
        "sequential/reward",
        "oppo/reward",
        "sequential/bubble",
        "oppo/bubble",
        "speedup",
    )
    assert set(wanted) <= set(names)
    assert names["speedup"]["median"] == 2.0
    assert "speedup_to_target" not in names  # unknown is left out, never made up
    assert set(document) == {"bench", "commit", "machine", "settings", "results"}
    assert [row.ratio for row in table_rows(slow, fast)][:3] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("model", DEMO)
def test_the_runs_of_a_demo_are_valid_and_differ_in_overlap_and_name_only(model: str) -> None:
    sequential, oppo = (
        load_spec(apply_changes(load_yaml(example_text(name)).model_dump(), changes)).model_dump()
        for name, changes in DEMO[model]
    )
    assert {section for section in oppo if oppo[section] != sequential[section]} == {"name", "overlap"}
    assert sequential["overlap"]["intra_step"] == sequential["overlap"]["inter_step"] == "off"


BARE_NODE = NodeOffer("n1", {"cpu": 2}, {}, frozenset(), rules=frozenset(), cpus=2)


@pytest.mark.parametrize("model", DEMO)
@pytest.mark.parametrize("offers", [[], [BARE_NODE]], ids=["no node", "bare node"])
def test_what_preflight_says_before_the_worker_has_reported_the_models_is_transient(model: str, offers: list[NodeOffer]) -> None:
    for name, changes in DEMO[model]:
        spec = load_spec(apply_changes(load_yaml(example_text(name)).model_dump(), changes))
        problems = find_problems(spec, offers)
        assert problems
        assert is_transient(Refused(422, "Invalid", errors=tuple(FieldProblem(it.path, it.message) for it in problems)))


@pytest.mark.parametrize(
    ("paths", "again"),
    [
        (["models.actor.path", "data.prompts", "evaluation.prompts"], True),
        ([""], True),
        (["models.actor.path", "steps"], False),
        (["steps"], False),
        ([], False),
    ],
)
def test_the_demo_submits_again_only_while_a_worker_or_its_models_are_missing(paths: list[str], again: bool) -> None:
    class Answers:
        asked = 0

        def submit(self, **_: object) -> SimpleNamespace:
            self.asked += 1
            if self.asked > 1:
                return SimpleNamespace(id=7)
            raise Refused(422, "Invalid", errors=tuple(FieldProblem(path, "is missing") for path in paths))

    answers = Answers()
    one = object.__new__(_Demo)
    one.client, one.setup, one._pause = answers, SimpleNamespace(project="letters"), lambda: None
    if again:
        assert one._submit("", {}) == 7
    else:
        with pytest.raises(Failure, match="rejected the demo's run: 422 Invalid"):
            one._submit("", {})
    assert answers.asked == 1 + again


# `web` with this instead of a server: threads that allocate memory, then glibc's list of its arenas.
ARENAS = """
import ctypes, threading, uvicorn
from oppo_cli.main import main

def serve(*_, **__):
    all_run = threading.Barrier(13)
    def work():
        kept = bytearray(100_000)
        all_run.wait()
    for _ in range(12):
        threading.Thread(target=work).start()
    all_run.wait()
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
    libc.fflush(None)

uvicorn.run = serve
main(["web"])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_info is glibc's")
@pytest.mark.parametrize(("arenas_max", "least", "most"), [(None, 1, 2), ("1", 1, 1), ("16", 3, 16)])
def test_web_uses_two_malloc_arenas_unless_the_environment_sets_another_number(arenas_max, least, most) -> None:
    environ = {**os.environ, "DATABASE_URL": "postgres://nobody@127.0.0.1:1/none"}
    environ.pop("MALLOC_ARENA_MAX", None)
    if arenas_max is not None:
        environ["MALLOC_ARENA_MAX"] = arenas_max
    report = subprocess.run([sys.executable, "-c", ARENAS], env=environ, capture_output=True, text=True, check=True).stdout
    assert least <= report.count("<heap nr=") <= most

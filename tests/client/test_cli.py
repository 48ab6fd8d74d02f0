"""The commands over the client, against a real platform: what they print, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from oppo_cli.main import main
from oppo_client import load_config
from tests.client.conftest import FILES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def oppo(live, token, monkeypatch):
    """Runs a command: `oppo("runs", "--json")`; yields its result."""
    monkeypatch.setenv("OPPO_URL", live.web.url)
    monkeypatch.setenv("OPPO_TOKEN", token)

    def run(*words, status=0, typed=None):
        done = CliRunner().invoke(main, [str(word) for word in words], input=typed)
        assert done.exit_code == status, done.output
        return done.output

    return run


@pytest.fixture
def file(spec, tmp_path):
    """A spec as a file; JSON is YAML."""
    place = tmp_path / "spec.yaml"
    place.write_text(json.dumps(spec("from a shell", steps=4)))
    return place


def test_logging_in_keeps_a_checked_token(oppo, live, token, monkeypatch):
    monkeypatch.delenv("OPPO_URL")
    monkeypatch.delenv("OPPO_TOKEN")
    assert "oppo login" in oppo("runs", status=2)
    oppo("login", live.web.url, typed="oppoapi_wrong\n", status=2)
    assert "oppo login" in oppo("runs", status=2)
    said = oppo("login", live.web.url + "/", typed=f"{token}\n")
    assert "You are mira" in said
    assert token not in said
    assert load_config().url == live.web.url
    oppo("runs")


def test_submitting_listing_and_cancelling(oppo, file):
    said = oppo("submit", file, "--set", "seed=41", "--set", "name=in the shell", "--set", "overlap.overcommit.max=8")
    number = int(said.split()[1])
    assert said.startswith(f"run {number} is queued: http")
    told = json.loads(oppo("submit", file, "--json"))
    assert (told["name"], told["total_steps"]) == ("from a shell", 4)
    listed = json.loads(oppo("runs", "name:shell", "--sort", "name", "--json"))
    assert [run["name"] for run in listed if run["id"] in (number, told["id"])] == ["from a shell", "in the shell"]
    table = oppo("runs", "name:shell", "--limit", 2).splitlines()
    assert table[0].split() == ["run", "name", "state", "step", "reward", "bubble", "project", "user"]
    assert len(table) == 3
    assert oppo("runs", "name:nothing-is-called-so") == "no runs\n"
    assert "cancelled" in oppo("cancel", number, told["id"])
    assert [run["state"] for run in json.loads(oppo("cancel", number, "--json"))] == ["cancelled"]


def test_refusal_exits_with_status_2_and_the_reason(oppo, file, tmp_path):
    assert "did you mean: batch_size" in oppo("submit", file, "--set", "ppo.batch_sizes=3", status=2)
    assert "PATH=VALUE" in oppo("submit", file, "--set", "seed", status=2)
    assert "404" in oppo("watch", 10**9, status=2)
    oppo("submit", tmp_path / "nowhere.yaml", status=2)


def test_missing_object_exits_with_status_1(oppo, monkeypatch):
    from oppo_client import client

    monkeypatch.setattr(client, "Retries", lambda: __import__("oppo_client").Retries(most=0))
    monkeypatch.setenv("OPPO_URL", "http://127.0.0.1:9")
    assert "cannot be reached" in oppo("runs", status=1)


def test_watching_tells_how_it_ended(oppo, live, client, spec, two_runs):
    assert "succeeded · step 60/60" in oppo("watch", two_runs[1])
    (told,) = oppo("watch", two_runs[1], "--json").splitlines()
    assert json.loads(told)["state"] == "succeeded"
    run = client.submit(spec("cancelled")).cancel()
    assert f"Run {run.id} ended as cancelled" in oppo("watch", run.id, status=1)


def test_logs_and_comparison(oppo, two_runs):
    assert oppo("logs", two_runs[1], "-n", 1) == "step 60 of 60, 16 answers\n"
    assert len(oppo("logs", two_runs[1], "--all", "--follow").splitlines()) == 62
    assert json.loads(oppo("logs", two_runs[1], "-n", 1, "--json"))["stream"] == "stderr"
    assert "no GPU" in oppo("logs", two_runs[1], "--search", "no GPU")
    lines = oppo("compare", *two_runs, "--target", 1).splitlines()
    assert lines[0].split() == ["run", *map(str, two_runs)]
    assert any(line.startswith("speedup") for line in lines)
    told = json.loads(oppo("compare", *two_runs, "--baseline", two_runs[1], "--json"))
    assert (told["baseline"], "series" in told) == (two_runs[1], False)


def test_a_checkpoint_is_pulled(oppo, live, client, spec, save, tmp_path):
    run = client.submit(spec("saving"))
    supervisor, story = live.start(run.id)
    supervisor.tell(list(story.tell(2)))
    save(supervisor, 2)
    folder = Path(oppo("pull", run.id, "--out", tmp_path).strip())
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert json.loads(oppo("pull", run.id, "--checkpoint", 2, "--out", tmp_path, "--json"))["folder"] == str(folder)
    assert "available steps: 2" in oppo("pull", run.id, "--checkpoint", 3, "--out", tmp_path, status=2)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands_and_options(shell, tmp_path):
    def run(*words, **environ):
        command = [sys.executable, "-c", "from oppo_cli.main import main; main(prog_name='oppo')", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environ)
        return done.stdout

    assert f"_OPPO_COMPLETE={shell}_complete" in run(_OPPO_COMPLETE=f"{shell}_source")
    asked = {"_OPPO_COMPLETE": f"{shell}_complete", "COMP_CWORD": "--fol" if shell == "fish" else "2"}
    assert "--follow" in run(**asked, COMP_WORDS="oppo logs --fol")


def test_commands_say_what_they_lack_where_only_the_client_is_installed(file, tmp_path):
    """As in an environment without the other extras: these modules cannot be imported."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('pydantic', 'ruamel', 'rich', 'django', 'psutil', 'numpy')))\n"
        "from oppo_cli.main import main\nmain(sys.argv[1:], 'oppo')\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("platform", "", "bench"))}

    def run(*words):
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True,
            text=True,
            check=False,
            env=environ,
        )

    listed = run("--help")
    assert (listed.returncode, "submit" in listed.stdout, "(needs " in listed.stdout) == (0, True, True), listed.stderr
    for words in (("spec", "check", str(file)), ("train", str(file), "--out", str(tmp_path / "out"))):
        done = run(*words)
        assert done.returncode == 1, (words, done.stdout, done.stderr)
        assert "pip install '.[" in done.stderr
        assert "Traceback" not in done.stderr

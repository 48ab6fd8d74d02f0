"""A folder in which the blocks of one page are executed, as its reader would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from oppo_contract.spec import load_spec
from oppo_contract.yaml_text import parse_yaml
from tests.docs.blocks import ROOT, Block, is_printed

LISTENS_WITHIN_S = 60.0
# What a page may leave out of a spec that it shows a part of.
LEAST_SPEC: dict[str, Any] = {
    "name": "shown",
    "steps": 1000,
    "models": {"actor": {"path": "models/actor"}, "reward": {"model": {"path": "models/reward"}}},
    "data": {"prompts": "prompts.jsonl"},
}


class Reader:
    """Somebody who does what a page says, in an empty folder, block after block."""

    def __init__(self, folder: Path, environment: dict[str, str], opened: ExitStack) -> None:
        self.folder, self.environment, self._opened = folder, environment, opened
        self._interpreter: subprocess.Popen[str] | None = None

    def follow(self, block: Block) -> None:
        """Do what a block says. Raises AssertionError with its place when that fails or prints something else."""
        if block.title:
            (self.folder / block.title).write_text(block.text, encoding="utf-8")
        if "spec" in block.words:
            check_spec(block)
        if "serves" in block.words:
            self._serve(block)
        elif "run" in block.words:
            printed = {"python": self._python, "sh": self._shell}[block.language](block)
            assert block.output is None or is_printed(block.output, printed), f"{block.name} printed\n{printed}"

    def _python(self, block: Block) -> str:
        if self._interpreter is None:
            command = [sys.executable, str(ROOT / "tests/docs/interpreter.py")]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._interpreter = self._opened.enter_context(_ended(command, self.folder, self.environment, **pipes))
        assert self._interpreter.stdin
        assert self._interpreter.stdout
        asked = {"page": str(block.page.relative_to(ROOT)), "line": block.line, "text": block.text}
        self._interpreter.stdin.write(json.dumps(asked) + "\n")
        self._interpreter.stdin.flush()
        told = json.loads(self._interpreter.stdout.readline() or '{"error": "Python ended", "printed": ""}')
        assert not told["error"], f"{block.name}\n{told['error']}"
        return str(told["printed"])

    def _shell(self, block: Block) -> str:
        done = subprocess.run(
            ["sh", "-eu", "-c", block.text], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.name} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, block: Block) -> None:
        file = self.folder / f"block{block.line}.py"
        file.write_text(block.text, encoding="utf-8")
        process = self._opened.enter_context(_ended([sys.executable, file.name], self.folder, self.environment))
        deadline = time.monotonic() + LISTENS_WITHIN_S
        while not any(one.status == psutil.CONN_LISTEN for one in psutil.Process(process.pid).net_connections()):
            assert process.poll() is None, f"{block.name} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{block.name} does not listen"
            time.sleep(0.02)


@contextmanager
def reader(folder: Path, environment: dict[str, str]) -> Iterator[Reader]:
    """A reader with an empty folder; whatever they have started ends with the page."""
    with ExitStack() as opened:
        yield Reader(folder, environment, opened)


@contextmanager
def _ended(command: list[str], folder: Path, environment: dict[str, str], **pipes: Any) -> Iterator[subprocess.Popen[Any]]:
    with subprocess.Popen(command, cwd=folder, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def check_spec(block: Block) -> None:
    """Whether it is a spec, or becomes one with what it leaves out."""
    load_spec(merged(LEAST_SPEC, parse_yaml(block.text)))


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid upon `under`; a reward is of one kind, so it replaces the one below."""
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(under.get(key), dict) and key != "reward"
        result[key] = merged(under[key], value) if both else value
    return result


def environment_of(base: dict[str, str], **more: str) -> dict[str, str]:
    """A reader's environment: the project's Python and `oppo` first on the PATH, and this checkout's code."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "platform", "bench"))
    first = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**base, "PATH": first, "PYTHONPATH": paths, **more}

"""Installs packages with reward rules in a folder of sys.path."""

from __future__ import annotations

from pathlib import Path

RULES = '''
"""Rules of a test."""
import time


def few(prompt, response):
    return -0.1 * len(set(response.split())) + 0.05 * len(prompt.split())


def parameters(prompt, response, *, ended, length, line):
    return (1.0 if ended else 0.0) + length / 100 + line["bonus"]


def turns(prompt, response, messages=None):
    return float(len(messages or [])) + (0.5 if prompt == "add two and three" else 0.0)


def last_turn(prompt, response, messages):
    assert prompt == messages[-1]["content"]
    return 1.0


def raises(prompt, response):
    raise KeyError("no answer in " + prompt)


def nan(prompt, response):
    return float("nan")


def text(prompt, response):
    return "7"


def backwards(response, prompt):
    return 0.0


def greedy(prompt, response, solution):
    return 0.0


def hangs(prompt, response):
    while True:
        time.sleep(0.01)


constant = 3.0
'''
NAMES = {
    "test:few": "few", "test:parameters": "parameters", "test:turns": "turns",
    "test:raises": "raises", "test:nan": "nan", "test:text": "text",
    "test:backwards": "backwards", "test:greedy": "greedy", "test:hangs": "hangs", "test:constant": "constant",
    "test:gone": "gone",
}  # fmt: skip


def install(folder: Path, distribution: str, module: str, source: str, entries: dict[str, str]) -> None:
    """What an installed package leaves in a folder of sys.path."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {module}:{function}\n" for name, function in entries.items())
    (info / "entry_points.txt").write_text(f"[oppo.rules]\n{lines}")

"""The blocks of a page that say of themselves that they run: by words after the language, which no reader sees.

    ```python run         executed; the Python blocks of a page follow each other in one process and know each other's names
    ```sh run             executed by a shell in the same folder; every command must succeed
    ```python run serves  executed beside the blocks that follow, until the page's end; it listens somewhere
    ```yaml spec          a spec, or a part of one
    ```text output        what the block before has printed; … stands for anything
    ```yaml title="a.yaml"  any block with a title is a file of that name, beside the others

`full`: in `make test-full` only. tests/docs/test_runnable.py executes them against a real platform.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>\w+)(?P<words>(?: +\w+)*)(?: +title=\"(?P<title>[^\"]+)\")? *\n"
    r"(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
KNOWN = {"run", "serves", "spec", "output", "full"}


@dataclass(frozen=True)
class Block:
    """A marked block: where it stands, what it is, and what it says that it prints (None: nothing said)."""

    page: Path
    line: int
    language: str
    words: frozenset[str]
    title: str
    text: str
    output: str | None = None

    @property
    def name(self) -> str:
        """`docs/client.md:10`."""
        return f"{os.path.relpath(self.page, ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page that may have blocks."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


def transformer_blocks(page: Path) -> list[Block]:
    """The marked blocks of a page, in order, outputs joined to what printed them. Raises ValueError for marks without meaning."""
    found: list[Block] = []
    for block in _fences(page):
        if "output" not in block.words:
            found.append(block)
            continue
        if not found or "run" not in found[-1].words:
            raise ValueError(f"{block.name}: nothing runs before this output")
        found[-1] = Block(**{**vars(found[-1]), "output": block.text})
    return found


def _fences(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        words = frozenset(fence["words"].split())
        line = text.count("\n", 0, fence.start()) + 1
        if words - KNOWN:
            raise ValueError(f"{page.name}:{line}: {', '.join(sorted(words - KNOWN))} means nothing")
        if words or fence["title"]:
            yield Block(page, line, fence["language"], words, fence["title"] or "", textwrap.dedent(fence["text"]))


def is_printed(said: str, printed: str) -> bool:
    """Whether a stated output is the printed one; `…` stands for anything, also over lines."""
    pattern = ".*?".join(re.escape(part) for part in _trimmed(said).split("…"))
    return re.fullmatch(pattern, _trimmed(printed), re.DOTALL) is not None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())

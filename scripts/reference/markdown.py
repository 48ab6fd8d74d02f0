"""Pieces of Markdown that the generated pages are put together from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# The first line of every generated page's text, for whoever opens it in an editor.
WRITTEN = "This page is written from the code by `make docs`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; `|` and line breaks within cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("|" + "|".join(_cell(cell) for cell in line) + "|" for line in lines) + "\n"


def _cell(text: str) -> str:
    return text if text == "---" else " " + " ".join(text.split()).replace("|", "\\|") + " "


def linked(words: str) -> str:
    """Words of the code with every `docs/x.md` as a link, from a page under docs/reference/."""
    return re.sub(r"\bdocs/([\w-]+)\.md\b", r"[\1](../\1.md)", words)


def code(text: str) -> str:
    """Text as code, also with a backtick in it; nothing for nothing."""
    if not text:
        return ""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def block(text: str, language: str = "") -> str:
    """A fenced block."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def paragraphs(docstring: str) -> list[str]:
    """The paragraphs of a docstring, each on one line."""
    return [" ".join(part.split()) for part in docstring.split("\n\n") if part.strip()]

"""What a guide calls *By its name* stands on a page of the platform, word for word but for capitals."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

# Pages on which italics with a capital are names of tabs, buttons, fields and headings, and of nothing else.
GUIDES = [
    "tutorial", "demo", "run-page", "runs", "comparing", "steering", "alerts", "storage", "teams", "tokens", "operations",
    *(f"how-to/{path.stem}" for path in sorted((ROOT / "docs/how-to").glob("*.md"))),
]  # fmt: skip
NAME = re.compile(r"(?<![*\w])\*([A-Z0-9][^*`]*)\*(?!\*)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
# Text between tags, and whatever stands in quotes: template literals have both.
IN_TEMPLATES = re.compile(r"<[^<>]*>|\{%.*?%\}|\{\{.*?\}\}|\"")
IN_CODE = re.compile(r"[\"'`]|\$\{|\}")


def names_in(page: str) -> Iterator[str]:
    """`Queue → Quotas and usage` names two."""
    text = CODE.sub("", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    for found in NAME.findall(text):
        yield from " ".join(found.split()).split(" → ")


def pieces(path: Path, apart: re.Pattern[str]) -> set[str]:
    """The texts in a file, in small letters."""
    return {" ".join(piece.split()).lower() for piece in apart.split(html.unescape(path.read_text(encoding="utf-8")))}


@pytest.fixture(scope="module")
def shown() -> set[str]:
    """Every text that the platform's pages are made of."""
    code = [*(ROOT / "static/js").rglob("*.js"), *(ROOT / "platform/oppo_platform/pages").glob("*.py")]
    code += [ROOT / "platform/oppo_contract/presets.py", ROOT / "platform/oppo_platform/alerts/policy.py"]
    texts = [pieces(path, IN_TEMPLATES) for path in (ROOT / "templates").rglob("*.html")]
    return set().union(*texts, *(pieces(path, IN_CODE) for path in code))


@pytest.mark.parametrize("page", GUIDES)
def test_every_name_stands_on_a_page(page: str, shown: set[str]) -> None:
    missing = [name for name in names_in(page) if name.lower() not in shown]
    assert not missing, f"docs/{page}.md names what no page of the platform has: {missing}"


def test_names_are_found_at_all() -> None:
    assert {"Dependencies", "Longest gaps", "2 steps"} <= set(names_in("how-to/read-the-timeline"))
    assert {"Queue", "Quotas and usage"} <= set(names_in("how-to/share-a-cluster"))

"""Blocks that say that they run do run, page by page, against a platform with everything real, and print what is said."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, is_printed, pages, transformer_blocks
from tests.docs.running import check_spec, environment_of, reader
from tests.docs.scenes import SCENES
from tests.end_to_end.conftest import Platform, environment, home, oppo, platform

FIXTURES = (home, platform)
pytestmark = pytest.mark.timeout(600)
BLOCKS = {str(page.relative_to(ROOT)): blocks for page in pages() if (blocks := transformer_blocks(page))}
SPECS = [block for blocks in BLOCKS.values() for block in blocks if "spec" in block.words]
ELSEWHERE = {"docs/tutorial.md"}  # its reader has an empty platform: tests/end_to_end/test_tutorial.py
RUN = {name: blocks for name, blocks in BLOCKS.items() if name not in ELSEWHERE and any("run" in block.words for block in blocks)}
QUICK = [name for name, blocks in RUN.items() if any("run" in block.words and "full" not in block.words for block in blocks)]
SLOW = [name for name, blocks in RUN.items() if any("full" in block.words for block in blocks)]


@pytest.mark.parametrize("block", SPECS, ids=lambda block: block.name)
def test_a_spec_is_one(block: Block) -> None:
    check_spec(block)


@pytest.mark.parametrize("name", QUICK)
def test_a_page_runs(name: str, platform: Platform, token: str, tmp_path: Path) -> None:
    follow(name, [block for block in RUN[name] if "full" not in block.words], platform, token, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SLOW)
def test_a_page_runs_in_full(name: str, platform: Platform, token: str, tmp_path: Path) -> None:
    follow(name, RUN[name], platform, token, tmp_path)


def follow(name: str, blocks: list[Block], platform: Platform, token: str, folder: Path) -> None:
    """Do what a page says, from the top to the bottom, in a folder of its own."""
    needs = re.findall(
        r"^(?:\w+=\S+ )*(curl)\b", "\n".join(block.text for block in blocks if block.language == "sh"), re.MULTILINE
    )
    if missing := [command for command in needs if shutil.which(command) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    SCENES.get(name, lambda platform, folder: None)(platform, folder)
    mine = {"OPPO_URL": platform.base_url, "OPPO_TOKEN": token, "OPPO_CONFIG": str(folder / "config.toml")}
    with reader(folder, environment_of(environment(platform.home), **mine)) as person:
        for block in blocks:
            person.follow(block)


@pytest.fixture(scope="module")
def token(platform: Platform) -> str:
    """A token of the first user, who owns the team."""
    return oppo(platform.home, "admin", "token", "admin", "--scope", "admin").stdout.strip()


@pytest.mark.parametrize(
    ("said", "printed", "same"),
    [
        ("run 17 …", "run 17 succeeded\n", True),
        ("a\nb", "a  \nb\n\n", True),
        ("a\n…\nc", "a\nb\nb\nc", True),
        ("run 17", "run 18", False),
        ("a", "a\nb", False),
    ],
)
def test_printed_output_is_compared_with_the_page(said: str, printed: str, same: bool) -> None:
    assert is_printed(said, printed) == same


def test_marks_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text, why in (("```python runs\n1\n```\n", "means nothing"), ("```text output\n1\n```\n", "nothing runs")):
        page.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=why):
            transformer_blocks(page)

"""The documentation builds strictly: links and anchors lead somewhere, the map has every page, nothing comes from elsewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a browser would fetch by itself: scripts, styles, pictures, frames; links that somebody clicks are not among them.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\bsrc="?(https?:)?//|<link(?![^>]*rel="?canonical)[^>]*href="?(https?:)?//"""
)
# Of the stylesheets and scripts that we bring ourselves; the theme's load nothing unless a page has what is named below.
IN_STYLES = re.compile(r"""(?:@import|url\()\s*["']?(?:https?:)?//""")

INLINE = re.compile(
    r"""<script>|<style|<[a-z][^<>]*\sstyle=|<[a-z][^<>]*\son[a-z]+=|<script(?![^>]*(?:src=|application/json))[^>]*>"""
)


def build(where: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """The site of the checkout at `where`, built strictly into `out`."""
    # Not with --quiet: what is not printed is not counted, and then nothing is strict.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=120, check=False)


def copied_into_image() -> list[str]:
    """Files and folders that the Dockerfile copies up to the end of its stage `build-docs`."""
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    needed = [stage for stage in stages if re.search(r" AS (build|build-docs)$", stage.splitlines()[0])]
    copies = [shlex.split(line)[1:-1] for stage in needed for line in stage.splitlines() if line.startswith("COPY ")]
    return [name for names in copies for name in names]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built from what the image for it has (Dockerfile, `build-docs`)."""
    out, image = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("image")
    shutil.copytree(ROOT / "scripts", image / "scripts")  # a link would lead the hooks out of the image
    for name in set(copied_into_image()) - {"scripts"}:
        (image / name).symlink_to(ROOT / name)
    done = build(image, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_built(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(map(str, pages - {path.relative_to(site) for path in site.rglob("*.html")})) == []
    assert (site / "architecture.html").is_file()


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert [str(path) for path, text in pages.items() if FETCHED.search(text)] == []
    # The theme would load a script for drawings in this language from a content network.
    assert [str(path) for path, text in pages.items() if 'class="mermaid"' in text] == []
    assert [str(path) for path in site.rglob("*.css") if IN_STYLES.search(path.read_text(encoding="utf-8"))] == []


def test_site_has_no_inline_scripts_and_styles(site: Path) -> None:
    """The policy of `oppo_platform/web/headers.py` allows none."""
    texts = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert sorted({found for text in texts for found in INLINE.findall(text)}) == []
    assert any(site.glob("assets/javascripts/inline.*.js"))


@pytest.mark.parametrize(
    ("addition", "told"),
    [
        ("[gone](gone.md)", "gone.md"),
        ("[no such heading](metrics.md#nowhere)", "nowhere"),
        ("![no picture](img/gone.png)", "img/gone.png"),
    ],
)
def test_a_link_that_leads_nowhere_fails(addition: str, told: str, tmp_path: Path) -> None:
    done = build(_copy(tmp_path, "alerts.md", addition), tmp_path / "out")
    assert done.returncode != 0
    assert told in done.stdout + done.stderr


def test_a_page_that_the_map_lacks_fails(tmp_path: Path) -> None:
    done = build(_copy(tmp_path, "new.md", "# New"), tmp_path / "out")
    assert done.returncode != 0
    assert "new.md" in done.stdout + done.stderr


def _copy(folder: Path, page: str, addition: str) -> Path:
    """What the site is made of, with a paragraph more on a page."""
    copy = folder / "checkout"
    copy.mkdir()
    shutil.copy(ROOT / "mkdocs.yml", copy)
    for name in ("docs", "scripts"):
        shutil.copytree(ROOT / name, copy / name)
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and not (copy / path.name).exists():
            (copy / path.name).symlink_to(path)
    with (copy / "docs" / page).open("a", encoding="utf-8") as file:
        file.write(f"\n{addition}\n")
    return copy

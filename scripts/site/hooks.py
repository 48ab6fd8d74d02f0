"""What mkdocs does here beyond its own: pages that stand outside docs/, links into the repository, and the platform's colours.

Every page is written for readers of the repository: links are relative to the file that they stand in, and may lead to files
outside docs/. In the site

- pages of the repository (`PAGES`) become pages of their own;
- any other file that a page links to becomes a page with its text, under `source/`;
- a link to a folder becomes its name.

`mkdocs.yml` names this file; `make docs` builds the site.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# Pages outside docs/, and where they stand in the site.
PAGES = {
    "README.md": "readme.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "examples/notebooks/README.md": "notebooks/index.md",
    **{f"examples/notebooks/{name}.ipynb": f"notebooks/{name}.md" for name in ("first-run", "compare", "fork")},
}
STYLES = "static/css/tokens.css"
LOGO = "static/img/favicon.svg"
LINK = re.compile(r"(?P<open>!?\[(?P<text>[^\]]*)\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
# Words after a block's language are for the tests that run it (tests/docs/blocks.py).
MARKED = re.compile(r"^( *`{3,}\w+)(?: +\w+)+(?= *(?:title=\"[^\"]+\")? *$)", re.MULTILINE)
PICTURE, TABLE, TEXT = "image/png", "text/html", "text/plain"  # outputs of a notebook
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".js": "javascript", ".css": "css", ".sh": "sh"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, linked files and assets that do not stand in docs/."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, content=_content(ROOT / path)))
    for path in sorted(linked_sources(files)):
        files.append(File.generated(config, source_page(path), content=_listing(path)))
    for path in (STYLES, LOGO):
        files.append(File.generated(config, f"assets/{posixpath.basename(path)}", abs_src_path=str(ROOT / path)))
    return files


def _content(path: Path) -> str:
    return as_markdown(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site, and hide the marks of blocks."""
    here = repository_path(page.file.src_uri)
    return MARKED.sub(r"\1", LINK.sub(lambda link: _in_site(link, here, page.file.src_uri), markdown))


def repository_path(place: str) -> str:
    """Where a page of the site stands in the repository."""
    return next((path for path, other in PAGES.items() if other == place), f"docs/{place}")


def linked_sources(files: Files) -> set[str]:
    """Files of the repository that pages link to and that are no pages themselves."""
    found = set()
    for file in files.documentation_pages():
        here = repository_path(file.src_uri)
        for link in LINK.finditer(file.content_string):
            path = _path(link["target"], here)
            if path and not path.startswith("docs/") and path not in PAGES and (ROOT / path).is_file():
                found.add(path)
    return found


def source_page(path: str) -> str:
    """Where a file of the repository stands in the site."""
    return f"source/{path}.md"


def _path(target: str, here: str) -> str | None:
    """What a link of the page `here` leads to, relative to the repository; None for another site."""
    if re.match(r"[a-z]+:|/", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    return None if path.startswith("..") else path


def _in_site(link: re.Match[str], here: str, place: str) -> str:
    path = _path(link["target"], here)
    if path is None or not (ROOT / path).exists():
        return link[0]  # elsewhere; or not there, which mkdocs tells better
    if (ROOT / path).is_dir():
        return link["text"]
    other = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else source_page(path))
    return f"{link['open']}{posixpath.relpath(other, posixpath.dirname(place) or '.')}{link['anchor'] or ''})"


def _listing(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", text))])
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def as_markdown(path: Path) -> str:
    """The page of a notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return "\n\n".join(_cell(cell) for cell in notebook["cells"]) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    return "\n\n".join([f"```python\n{text}\n```", *(_output(output) for output in cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {TEXT: output.get("text", "")})
    if PICTURE in data:
        return f"![figure](data:image/png;base64,{''.join(data[PICTURE]).strip()})"
    if TABLE in data:
        return f'<div class="output">{"".join(data[TABLE])}</div>'
    return f"```text\n{''.join(data[TEXT]).rstrip()}\n```"

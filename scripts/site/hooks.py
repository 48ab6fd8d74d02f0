"""mkdocs hooks (`make docs`): pages outside docs/, links into the repository, the platform's stylesheet, no inline scripts.

Pages link to files of the repository, relative to themselves. In the site:

- pages outside docs/ (`PAGES`) become pages;
- other linked files become pages with their text, under `source/`;
- a link to a folder becomes its name.

The platform serves the site under its content security policy (`oppo_platform/web/headers.py`), which allows scripts and styles
from files only: inline scripts of the theme become files, and notebook outputs lose their inline styles.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# Pages outside docs/ → paths in the site.
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
# Words after the language of a block are for tests/docs/blocks.py.
BLOCK_OPTIONS = re.compile(r"^( *`{3,}\w+)(?: +\w+)+(?= *(?:title=\"[^\"]+\")? *$)", re.MULTILINE)
SEARCH_DIALOG = 'data-md-component="search" role="dialog"'  # the theme gives it no name
INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
INLINE_STYLE = re.compile(r'\sstyle="[^"]*"')
PNG, TABLE, TEXT = "image/png", "text/html", "text/plain"  # notebook outputs
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".js": "javascript", ".css": "css", ".sh": "sh"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages, linked files and assets from outside docs/."""
    for path, site_path in PAGES.items():
        files.append(File.generated(config, site_path, content=_content(ROOT / path)))
    for path in sorted(linked_sources(files)):
        files.append(File.generated(config, source_page(path), content=_source_listing(path)))
    for path in (STYLES, LOGO):
        files.append(File.generated(config, f"assets/{posixpath.basename(path)}", abs_src_path=str(ROOT / path)))
    return files


def _content(path: Path) -> str:
    return notebook_markdown(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links between files of the repository to links between pages, and remove block options."""
    here = repository_path(page.file.src_uri)
    return BLOCK_OPTIONS.sub(r"\1", LINK.sub(lambda link: _site_link(link, here, page.file.src_uri), markdown))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Write inline scripts into files, each text once, which run at the same place of the page; name the search dialog."""

    def as_file(script: re.Match[str]) -> str:
        name = f"assets/javascripts/inline.{hashlib.sha256(script[1].encode()).hexdigest()[:8]}.js"
        path = Path(config.site_dir, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script[1], encoding="utf-8")
        return f'<script src="{get_relative_url(name, page.url)}"></script>'

    return INLINE_SCRIPT.sub(as_file, output.replace(SEARCH_DIALOG, f'{SEARCH_DIALOG} aria-label="Search"'))


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Drop the theme's 404 page: the platform has its own."""
    return "" if template_name == "404.html" else output_content


def repository_path(site_path: str) -> str:
    """Path in the repository of a page of the site."""
    return next((path for path, other in PAGES.items() if other == site_path), f"docs/{site_path}")


def linked_sources(files: Files) -> set[str]:
    """Files that pages link to and that are not pages."""
    sources = set()
    for file in files.documentation_pages():
        here = repository_path(file.src_uri)
        for link in LINK.finditer(file.content_string):
            path = _target_path(link["target"], here)
            if path and not path.startswith("docs/") and path not in PAGES and (ROOT / path).is_file():
                sources.add(path)
    return sources


def source_page(path: str) -> str:
    """Path in the site of a linked file."""
    return f"source/{path}.md"


def _target_path(target: str, here: str) -> str | None:
    """Repository path of a link on page `here`; None for a link to another site."""
    if re.match(r"[a-z]+:|/", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    return None if path.startswith("..") else path


def _site_link(link: re.Match[str], here: str, site_path: str) -> str:
    path = _target_path(link["target"], here)
    if path is None or not (ROOT / path).exists():
        return link[0]  # another site, or missing, which mkdocs reports
    if (ROOT / path).is_dir():
        return link["text"]
    other = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else source_page(path))
    return f"{link['open']}{posixpath.relpath(other, posixpath.dirname(site_path) or '.')}{link['anchor'] or ''})"


def _source_listing(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", text))])
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def notebook_markdown(path: Path) -> str:
    """A notebook as Markdown."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return "\n\n".join(_cell(cell) for cell in notebook["cells"]) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    return "\n\n".join([f"```python\n{text}\n```", *(_output(output) for output in cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {TEXT: output.get("text", "")})
    if PNG in data:
        return f"![figure](data:image/png;base64,{''.join(data[PNG]).strip()})"
    if TABLE in data:
        return f'<div class="output">{INLINE_STYLE.sub("", "".join(data[TABLE]))}</div>'
    return f"```text\n{''.join(data[TEXT]).rstrip()}\n```"

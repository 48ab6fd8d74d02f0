"""The built site in a browser, under the platform's content security policy: nothing comes from elsewhere, pages fit a phone, the
search finds, colours can be told apart."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from oppo_platform.web.headers import POLICY
from tests.browser.conftest import chromium
from tests.docs.test_site import site

FIXTURES = (chromium, site)
pytestmark = pytest.mark.browser
# A name for the search's dialog is the theme's to give, as are those of its navigation.
OF_THE_THEME = {"aria-dialog-name", "landmark-unique", "empty-table-header"}
LOOKED_AT = ("index.html", "client.html", "pictures.html")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files as the platform does, and logs nothing."""

    def end_headers(self) -> None:
        """The platform's policy."""
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def test_pages_fit_a_phone_and_ask_nobody_else(chromium: Any, address: str) -> None:
    look_at(chromium, address, (*LOOKED_AT, "notebooks/compare.html"))


@pytest.mark.full
def test_every_page_does(chromium: Any, site: Path, address: str) -> None:
    paths = [path.relative_to(site) for path in sorted(site.rglob("*.html"))]
    look_at(chromium, address, [str(path) for path in paths if "source" not in path.parts])


def look_at(chromium: Any, address: str, paths: Iterable[str]) -> None:
    """Open pages on a phone; none may be wider than it, and nothing may come from elsewhere."""
    page = chromium.new_context(viewport={"width": 400, "height": 800}).new_page()
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    wide = []
    for path in paths:
        page.goto(address + path)
        wide += [path] if page.evaluate("document.documentElement.scrollWidth") > 400 else []
    assert wide == []
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert complaints == []
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible(chromium: Any, address: str, scheme: str) -> None:
    page = chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme).new_page()
    found = []
    for path in LOOKED_AT:
        page.goto(address + path)
        page.wait_for_selector(f'body[data-md-color-scheme="{"slate" if scheme == "dark" else "default"}"]')
        found += [(path, each["id"]) for each in Axe().run(page).response["violations"] if each["id"] not in OF_THE_THEME]
    assert found == []
    page.context.close()


def test_the_search_finds_what_is_generated_too(chromium: Any, address: str) -> None:
    page = chromium.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(address)
    page.click("input.md-search__input")
    page.keyboard.type("kept-databases")
    page.wait_for_selector(".md-search-result__item a[href*='reference/commands.html']")
    page.context.close()

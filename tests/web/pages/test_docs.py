"""The documentation at /docs/: public, within its folder, under the same policy; without the site, how to build it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.test import Client

from oppo_platform.web.headers import POLICY

ROOT = Path(__file__).resolve().parents[3]
LINK = re.compile(r"""parts/help_link\.html" with page="([^"]+)"|url 'pages:docs' '([^']+)' %\}(#[\w-]+)?""")


@pytest.fixture
def site(tmp_path, settings):
    """A small site, and a file beside it."""
    (tmp_path / "secret.html").write_text("not for readers")
    folder = tmp_path / "site"
    (folder / "search").mkdir(parents=True)
    (folder / "index.html").write_text("<h1>Contents</h1>" + "x" * 500)
    (folder / "search" / "index.html").write_text("<h1>Search</h1>")
    (folder / "search" / "worker.js").write_text("0")
    settings.DOCS_SITE = folder
    return folder


@pytest.fixture
def unbuilt(tmp_path, settings):
    """A checkout without the site."""
    settings.DOCS_SITE = tmp_path / "site"
    settings.DOCS_MARKDOWN = tmp_path / "docs"
    settings.DOCS_MARKDOWN.mkdir()
    (settings.DOCS_MARKDOWN / "index.md").write_text("# Contents")
    (settings.DOCS_MARKDOWN / "alerts.md").write_text("# Alerts <script>")


def test_anybody_reads_the_site(db, site):
    browser = Client()
    home = browser.get("/docs/")
    assert (home.status_code, home.headers["Content-Type"]) == (200, "text/html")
    assert b"Contents" in home.content
    assert browser.get("/docs/index.html").content == home.content
    assert b"Search" in browser.get("/docs/search/").content
    assert browser.get("/docs/search/worker.js").headers["Content-Type"].startswith("text/javascript")
    assert browser.get("/docs/nowhere.html").status_code == 404
    assert browser.post("/docs/").status_code == 405


def test_the_policy_is_that_of_every_page(db, site):
    assert Client().get("/docs/").headers["Content-Security-Policy"] == POLICY


def test_pages_are_compressed_and_sent_once(db, site):
    browser = Client(headers={"accept-encoding": "gzip"})
    reply = browser.get("/docs/")
    assert reply.headers["Content-Encoding"] == "gzip"
    assert browser.get("/docs/", headers={"if-none-match": reply.headers["ETag"]}).status_code == 304


@pytest.mark.parametrize(
    "path", ["../secret.html", "%2e%2e/secret.html", "search/../../secret.html", "/etc/passwd", "a%00b", "x" * 300]
)
def test_nothing_outside_the_site_is_served(db, site, path):
    reply = Client().get(f"/docs/{path}")
    assert reply.status_code == 404
    assert b"not for readers" not in reply.content


def test_without_the_site_the_page_says_how_to_build_it(db, unbuilt):
    browser = Client()
    home = browser.get("/docs/")
    assert home.status_code == 200
    assert "make docs" in home.content.decode()
    assert 'href="/docs/index.md"' in home.content.decode()
    page = browser.get("/docs/alerts.html")
    assert page.status_code == 200
    assert 'href="/docs/alerts.md"' in page.content.decode()
    text = browser.get("/docs/alerts.md")
    assert (text.content, text.headers["Content-Type"]) == (b"# Alerts <script>", "text/plain; charset=utf-8")
    assert browser.get("/docs/nowhere.html").status_code == 404
    assert browser.get("/docs/../settings.md").status_code == 404


def test_without_the_site_and_a_checkout_the_page_says_so_too(db, tmp_path, settings):
    settings.DOCS_SITE = settings.DOCS_MARKDOWN = tmp_path / "nowhere"
    home = Client().get("/docs/")
    assert home.status_code == 200
    assert "make docs" in home.content.decode()
    assert ".md" not in home.content.decode()


def test_the_hint_has_the_navigation_for_who_is_logged_in(world, unbuilt):
    assert 'class="rail"' in world.login("ada").get("/docs/").content.decode()
    assert 'class="rail"' not in Client().get("/docs/").content.decode()


def links():
    """Pages of the documentation that templates link to."""
    found = [LINK.findall(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "templates").rglob("*.html"))]
    return sorted({named or page + anchor for each in found for named, page, anchor in each})


@pytest.mark.parametrize("link", links())
def test_every_help_link_leads_to_a_heading(link):
    page, _, anchor = link.partition("#")
    text = (ROOT / "docs" / page).with_suffix(".md").read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.splitlines() if line[:1] == "#"
    }
    assert not anchor or anchor in headings


def test_the_main_pages_have_help_links():
    assert {"scheduling.html", "comparing.html", "alerts.html", "run-page.html#samples", "how-to/write-a-spec.html"} <= set(
        links()
    )

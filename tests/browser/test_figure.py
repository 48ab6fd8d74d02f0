"""The Plotly figure on the Timeline tab."""

from __future__ import annotations

import json

import pytest

from tests.browser.test_pages import faults

pytestmark = pytest.mark.browser


@pytest.mark.full
def test_a_figure_of_the_window_is_looked_at_and_taken_away(visit, two_runs):
    visitor = visit(color_scheme="dark")
    page = visitor.page
    page.goto(f"/runs/{two_runs[1]}/timeline?window=3-5")
    page.wait_for_selector("#worst li")
    page.focus("#figure")
    page.keyboard.press("Enter")
    page.wait_for_selector("#figure-plot .main-svg .barlayer path >> nth=10")
    assert page.inner_text("#figure-title") == "Steps 4–5"
    assert page.evaluate("document.getElementById('figure-plot').layout.paper_bgcolor") == "#14181f"
    assert faults(page) == []
    for kind, head in (("svg", b"<svg"), ("png", b"\x89PNG")):
        with page.expect_download() as saved:
            page.click(f"[data-picture={kind}]")
        assert saved.value.suggested_filename == f"run-{two_runs[1]}-steps-4-5.{kind}"
        assert saved.value.path().read_bytes().startswith(head)
    with page.expect_download() as saved:
        page.click("#figure-json")
    assert {"data", "layout"} == set(json.loads(saved.value.path().read_text()))
    page.keyboard.press("Escape")
    page.wait_for_selector("#figure-dialog", state="hidden")
    assert page.evaluate("document.activeElement.id") == "figure"

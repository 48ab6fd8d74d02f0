"""From the empty list of runs to the first run: the checklist ticks itself, leads to the form, and goes."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tests.browser import fleet
from tests.browser.test_keyboard import press
from tests.browser.test_pages import faults, keys_lead_on

pytestmark = pytest.mark.browser
OFFERED = fleet.CATALOGUE

# A button that can be used from now on changes its colours gradually, and has too little contrast on the way.
COLOURS_CHANGED = "() => Promise.all(document.getAnimations().map((one) => one.finished))"


@pytest.fixture
def newcomer(platform):
    """Owner of a team without runs, and cluster administrator."""
    from oppo_platform import clock
    from oppo_platform.accounts.models import Team
    from oppo_platform.accounts.services import create_team, create_user
    from oppo_platform.projects.models import Project

    user = create_user("noor", "noor@example.org", administers=True).user
    create_team("Newcomers", user)
    Project.objects.create(team=Team.objects.get(name="Newcomers"), name="first", created_at=clock.now())
    return user


def fits_and_is_accessible(visitor):
    for width, scheme in ((390, "light"), (1024, "dark"), (1440, "light")):
        visitor.page.set_viewport_size({"width": width, "height": 860})
        visitor.page.emulate_media(color_scheme=scheme)
        visitor.page.evaluate(COLOURS_CHANGED)
        assert faults(visitor.page) == []
        visitor.fits()


def test_the_checklist_leads_from_nothing_to_the_first_run(visit, platform, newcomer, monkeypatch):
    from oppo_platform.accounts.services import create_login_link

    monkeypatch.setattr(fleet, "CATALOGUE", [])
    visitor = visit(logged_in=False, viewport={"width": 390, "height": 860})
    page = visitor.page
    page.goto(urlsplit(create_login_link(newcomer)).path)
    page.goto("/runs")
    expect(page.locator("#first-worker")).to_contain_text("node-1, 1 CPU device")
    expect(page.locator("#first-run [data-done]")).to_have_count(1)
    expect(page.locator("#first-model .command")).to_have_text("oppo example smollm2")
    fits_and_is_accessible(visitor)
    keys_lead_on(page)
    press(page, "#first-model button")
    expect(page.locator(".toast")).to_have_text(re.compile("Copied|Selected"))
    monkeypatch.setattr(fleet, "CATALOGUE", [entry for entry in OFFERED if entry.kind == "prompts"])
    platform.fleet.beat()
    expect(page.locator("#first-prompts")).to_have_attribute("data-done", "")  # without a reload
    expect(page.locator("#first-model button")).to_be_focused()
    monkeypatch.setattr(fleet, "CATALOGUE", OFFERED)
    platform.fleet.beat()
    expect(page.locator("#first-done")).to_contain_text("4 of 4 ready")
    page.evaluate(COLOURS_CHANGED)
    assert faults(page) == []

    platform.fleet.beat()  # a node that has been silent for a minute offers nothing
    form = visitor.context.new_page()
    form.goto("/runs")
    form.click("#first-submit >> text=New run")
    form.wait_for_selector("#send[aria-disabled=false]")
    expect(form.locator("[data-path='models.actor']")).to_have_value("letters/actor")
    expect(form.locator("[data-path='data.prompts']")).to_have_value("letters/prompts.jsonl")
    form.click("#send")
    form.wait_for_url(re.compile(r"/runs/\d+$"))
    page.bring_to_front()
    page.wait_for_selector("#rows tr")  # by itself
    expect(page.locator("#first-run")).to_have_count(0)


def test_a_form_without_models_leads_to_the_checklist(visit, platform, monkeypatch):
    """Here there are runs already, so it leads to the page on models."""
    monkeypatch.setattr(fleet, "CATALOGUE", [])
    page = visit().page
    page.goto("/runs/new")
    expect(page.locator(".banner")).to_contain_text("Missing: A language model to train; Prompts; A reward: a model or a rule.")
    monkeypatch.undo()
    platform.fleet.beat()


@pytest.mark.parametrize("width", [390, 1440])
def test_help_is_one_click_away(visit, platform, width):
    visitor = visit(viewport={"width": width, "height": 860})
    visitor.page.goto("/queue")
    link = visitor.page.get_by_role("link", name="Help: how runs are scheduled (new tab)")
    expect(link).to_be_in_viewport()
    with visitor.context.expect_page() as opened:
        link.click()
    opened.value.wait_for_selector("h1")
    assert urlsplit(opened.value.url).path == "/docs/scheduling.html"
    assert visitor.page.locator(".rail > a >> text=Help").is_visible() == (width == 1440)

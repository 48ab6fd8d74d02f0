"""The plan on the submit page, before a run, and beside what happened on the run's page."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from oppo_platform.runs.models import Run

pytestmark = pytest.mark.browser

READY = "#send[aria-disabled=false]"


def open_form(page):
    page.goto("/runs/new")
    page.wait_for_selector(READY)
    page.wait_for_selector("#plan-estimates:not([hidden])")


def test_the_form_shows_memory_time_start_and_saving(visit, platform, two_runs):
    visitor = visit()
    page = visitor.page
    open_form(page)
    expect(page.locator("#plan-duration-sub")).to_have_text(re.compile(r" a step; from \d+ earlier runs? of this actor"))
    expect(page.locator("#plan-start")).to_have_text("now")
    expect(page.locator("#plan-hours"), "few device-hours as a duration").to_have_text(re.compile(r"^(\d+ m )?[\d.]+ s$"))
    expect(page.locator("#plan-hours-sub")).to_have_text("Xeon, 2 cores")
    expect(page.locator("#plan-saving")).to_have_text(re.compile(r"^\d+ %$|^none$"))
    device = page.locator(".plan-device")
    expect(device).to_contain_text("actor, reference, critic, reward 1")
    expect(device.locator("progress")).to_have_attribute("aria-label", re.compile(r"GiB of 4\.00 GiB"))
    device.locator("summary").press("Enter")
    expect(device.locator("tbody tr", has_text="activations").first).to_be_visible()
    page.fill("[data-path=steps]", "1")
    page.wait_for_function("() => document.querySelector('#plan-answers').textContent === '16'")
    page.wait_for_selector(READY)
    expect(device.locator("tbody tr").first).to_be_visible()  # it stays open
    for width in (1440, 1024, 390):
        page.set_viewport_size({"width": width, "height": 900})
        visitor.fits()
    assert Axe().run(page).response["violations"] == []


def test_a_run_that_does_not_fit_shows_the_setting_with_which_it_would(visit, platform):
    page = visit().page
    open_form(page)
    page.click("[data-view=yaml]")
    text = page.input_value("#yaml")
    text = re.sub(r"micro_batch_tokens: \d+", "micro_batch_tokens: 65536", text)
    page.fill("#yaml", re.sub(r"batch_size: \d+", "batch_size: 64", text))
    remedy = page.locator(".plan-remedy")
    expect(remedy).to_contain_text("It does not fit. It would with ppo.micro_batch_tokens")
    expect(page.locator(READY)).to_be_visible()  # it informs only
    remedy.get_by_role("button", name="Use this").press("Enter")
    expect(remedy).to_have_count(0)
    expect(page.locator("#yaml")).to_have_value(re.compile(r"micro_batch_tokens: (?!65536)\d+"))


def test_the_plan_disappears_while_the_spec_is_not_valid(visit, platform):
    page = visit().page
    open_form(page)
    page.fill("[data-path=steps]", "0")
    page.wait_for_selector("#plan-estimates", state="hidden")
    expect(page.locator("#plan-memory-part")).to_be_hidden()


def test_the_page_of_a_run_shows_plan_and_actual(visit, platform, two_runs):
    visitor = visit()
    page = visitor.page
    open_form(page)
    page.fill("[data-path=steps]", "20")
    page.fill("[data-path=name]", "planned")
    page.wait_for_selector(READY)
    page.click("#send")
    page.wait_for_url(re.compile(r"/runs/\d+$"))
    run = Run.objects.get(name="planned")
    supervisor, story = platform.start(run.pk)
    supervisor.tell(list(story.tell(20)))
    supervisor.tell(story.end())
    supervisor.end("succeeded", "All steps are done.")
    page.reload()
    table = page.locator(".plan-review")
    three_digits = r"(\d{2,} ms|[\d.]{4,} s)"
    expect(table.locator("tr", has_text="Step time")).to_have_text(re.compile(rf"{three_digits}\s+{three_digits}\s+[+−]?\d+ %"))
    hours = table.locator("tr", has_text="Device-hours")
    expect(hours).not_to_contain_text("projected")
    expect(hours, "few device-hours as a duration").to_have_text(re.compile(r"(\d+ m )?[\d.]+ s\s+(\d+ m )?[\d.]+ s"))
    expect(page.locator("#run [data-part=cost]")).to_have_text(re.compile(r" [\d.]+ s of device time"))
    expect(table).to_contain_text("earlier run")
    page.set_viewport_size({"width": 390, "height": 900})
    visitor.fits()
    page.goto(f"/runs/{two_runs[0]}")
    expect(page.locator("#plot-reward")).to_be_visible()
    expect(page.locator(".plan-review")).to_have_count(0)

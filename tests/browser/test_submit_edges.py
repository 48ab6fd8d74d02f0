"""Nothing that was entered on the submit page is lost: broken YAML, names, presets, suggestions, and what was refused."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser
READY = "#send[aria-disabled=false]"


@pytest.fixture
def page(visit):
    """The submit page, ready to submit."""
    visitor = visit()
    visitor.expects("Failed to load resource")
    visitor.page.goto("/runs/new")
    visitor.page.wait_for_selector(READY)
    return visitor.page


def test_yaml_that_cannot_be_read_is_kept_until_it_can_and_then_has_what_was_entered_in_the_form(page):
    page.click("[data-view=yaml]")
    whole = page.input_value("#yaml")
    broken = whole.replace("\nppo:", "\n# my words\n\tppo:")
    assert broken != whole
    page.fill("#yaml", broken)
    page.wait_for_selector("#problems .bad >> nth=0")
    page.click("[data-view=form]")
    expect(page.locator("#why-not")).to_contain_text("Correct the YAML first")
    expect(page.locator("[name=preset]").first).to_be_disabled()
    page.fill("[data-path=steps]", "33")
    page.keyboard.press("Tab")
    page.wait_for_timeout(1000)
    expect(page.locator("#yaml")).to_have_value(broken)
    expect(page.locator("#problems")).to_contain_text("is not valid YAML")
    page.get_by_role("button", name="Go to the YAML").click()
    page.fill("#yaml", whole)
    page.wait_for_selector(READY)
    expect(page.locator("#yaml")).to_have_value(re.compile(r"^steps: 33$", re.MULTILINE))
    page.click("[data-view=form]")
    expect(page.locator("[data-path=steps]")).to_have_value("33")
    expect(page.locator("[name=preset]").first).to_be_enabled()


def test_emptied_yaml_is_filled_from_the_form(page):
    page.click("[data-view=yaml]")
    page.fill("#yaml", "")
    page.wait_for_selector("#problems .bad >> nth=0")
    page.click("[data-view=form]")
    page.fill("[data-path=steps]", "33")
    page.wait_for_selector(READY)
    expect(page.locator("#yaml")).to_have_value(re.compile(r"^steps: 33$", re.MULTILINE))


def test_a_page_that_comes_back_after_its_submission_can_submit_again(page):
    page.route("**/api/v1/runs", lambda route: route.fulfill(status=201, json={"url": "/runs/nowhere"}))
    page.route("**/runs/nowhere", lambda route: route.fulfill(status=204))  # the page stays
    page.click("#send")
    expect(page.locator("#why-not")).to_have_text("Submitting …")
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
    page.wait_for_selector(READY)


def test_a_name_that_was_written_in_yaml_is_kept(page):
    page.click("[data-view=yaml]")
    page.fill("#yaml", re.sub(r"^name: .*$", "name: my own", page.input_value("#yaml"), flags=re.MULTILINE))
    page.wait_for_selector(READY)
    page.click("[data-view=form]")
    page.fill("[data-path=steps]", "33")
    page.wait_for_selector(READY)
    expect(page.locator("[data-path=name]")).to_have_value("my own")


def test_a_preset_restores_only_what_it_replaced(page):
    page.check("[name=preset][value=grpo]")
    page.wait_for_selector(READY)
    page.select_option("[data-path='ppo.algorithm']", "ppo")
    rate = page.locator("[data-path='ppo.critic_learning_rate']")
    rate.fill("0.00321")
    page.wait_for_selector(READY)
    page.check("[name=preset][value=sequential]")
    page.wait_for_selector(READY)
    expect(rate).to_have_value("0.00321")
    page.check("[name=preset][value=grpo]")
    page.check("[name=preset][value=sequential]")
    page.wait_for_selector(READY)
    expect(rate).to_have_value("0.00321")


def test_a_suggested_key_is_not_taken_for_the_fields_value(page):
    page.click("[data-view=yaml]")
    page.fill(
        "#yaml", re.sub(r"^( +)path: letters/actor$", r"\g<0>\n\1pth: x", page.input_value("#yaml"), count=1, flags=re.MULTILINE)
    )
    field = page.locator("[data-field='models.actor'] .error")
    expect(field).to_contain_text("Did you mean path?")
    expect(field.locator("button")).to_have_count(0)


def test_a_sequential_run_keeps_a_maximum_below_the_usual_initial_value(page):
    page.fill("[data-path='overlap.overcommit.max']", "2")
    page.fill("[data-path='overlap.overcommit.initial']", "")
    page.wait_for_selector(READY)
    page.check("[name=preset][value=sequential]")
    page.wait_for_selector(READY)


def test_tags_that_were_refused_can_be_corrected_and_a_blocked_submission_asks_again(page):
    page.fill("#tags", " ".join(f"tag{n}" for n in range(21)))
    page.click("#send")
    expect(page.locator("#why-not")).to_contain_text("Fix 1 problem")
    expect(page.locator("#problems")).to_contain_text("tags")
    with page.expect_request("**/runs/validate"):
        page.fill("#tags", "tag")
    page.wait_for_selector(READY)
    page.fill("[data-path=steps]", "0")
    expect(page.locator("#why-not")).to_contain_text("Fix 1 problem")
    with page.expect_request("**/runs/validate"):
        page.locator("#send").press("Enter")

"""From the form to the queue: presets, live validation, two views of one spec, forks."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.browser

READY = "#send[aria-disabled=false]"


def open_form(visit, path="/runs/new"):
    page = visit().page
    page.goto(path)
    page.wait_for_selector(READY)
    return page


def test_a_run_goes_from_the_form_into_the_queue(visit, platform, two_runs):
    from oppo_platform.runs.models import Run
    from oppo_platform.scheduling.cycle import run_cycle

    holder = platform.submit("letters holder", steps=10)
    platform.start(holder)
    page = open_form(visit)
    page.check("input[name=preset][value=sequential]")
    page.fill("[data-path=name]", "from the form")
    page.fill("[data-path=steps]", "25")
    page.fill("[data-path='ppo.learning_rate']", "2e-5")
    page.fill("[data-path='budget.target_reward']", "1.2")
    page.select_option("[data-path='models.actor']", "letters/actor")
    page.wait_for_selector(READY)
    page.click("#send")
    page.wait_for_url(re.compile(r"/runs/\d+$"))
    page.wait_for_selector(".pill[data-state=queued]")
    run = Run.objects.order_by("-id").first()
    assert (run.name, run.preset, run.total_steps, run.target_reward) == ("from the form", "sequential", 25, 1.2)
    assert run.spec["ppo"]["learning_rate"] == 2e-5
    run_cycle()
    page.goto("/queue")
    row = page.locator(".queue tr", has_text="from the form")
    assert "in use" in row.inner_text()
    assert "letters holder" in page.locator("[data-key^=pool]").inner_text()


def test_a_wrong_value_is_told_at_its_field_while_one_types(visit, platform):
    page = open_form(visit)
    page.fill("[data-path='overlap.overcommit.max']", "999")
    error = page.locator("[data-field='overlap.overcommit.max'] .error")
    error.wait_for(state="visible")
    assert "16" in error.inner_text()
    assert page.get_attribute("[data-path='overlap.overcommit.max']", "aria-invalid") == "true"
    assert page.get_attribute("#send", "aria-disabled") == "true"
    assert "One thing" in page.inner_text("#why-not")
    page.fill("[data-path='overlap.overcommit.max']", "16")
    page.wait_for_selector(READY)
    assert error.is_hidden()
    page.fill("[data-path=steps]", "many")
    page.locator("[data-field=steps] .error").wait_for(state="visible")


def test_an_actor_with_another_tokenizer_is_refused_before_anything_is_queued(visit, platform):
    page = open_form(visit)
    page.select_option("[data-path='models.actor']", "letters/other-actor")
    page.wait_for_selector("#problems >> text=tokenizer")
    assert page.get_attribute("#send", "aria-disabled") == "true"


def test_yaml_and_form_are_two_views_of_one_spec(visit, platform):
    page = open_form(visit)
    page.fill("[data-path=steps]", "77")
    page.wait_for_selector(READY)
    page.click("[data-view=yaml]")
    text = page.input_value("#yaml")
    assert "\nsteps: 77\n" in text
    page.fill("#yaml", text.replace("steps: 77", "steps: 78").replace("inter_step: defer", "inter_step: off"))
    page.wait_for_function("() => document.querySelector('#plan-answers').textContent === '1,248'")
    page.click("[data-view=form]")
    assert page.input_value("[data-path=steps]") == "78"
    assert page.locator("[data-path='overlap.max_age']").is_disabled()
    assert page.locator("#custom").is_visible()


def test_a_reward_in_parts_goes_through_the_form_unchanged(visit, platform):
    page = open_form(visit)
    page.click("[data-view=yaml]")
    parts = "  reward:\n    parts:\n      - rule: letters:score\n      - model: {path: letters/reward}\n"
    text = re.sub(r"  reward:\n(?:    .*\n)+", parts, page.input_value("#yaml"))
    page.fill("#yaml", text.replace("critic: reward", "critic: actor").replace("\nsteps: ", "\nsteps: 7"))
    page.wait_for_function("() => document.querySelector('#plan-answers').textContent === '115,200'")
    page.wait_for_selector(READY)
    page.click("[data-view=form]")
    chosen = page.locator("[data-path='models.reward']")
    assert "several sources" in chosen.evaluate("select => select.selectedOptions[0].textContent")
    page.fill("[data-path=steps]", "79")
    page.wait_for_selector(READY)
    page.click("[data-view=yaml]")
    assert "rule: letters:score" in page.input_value("#yaml")
    assert "\nsteps: 79\n" in page.input_value("#yaml")


def test_broken_yaml_is_told_live_with_place_and_remedy(visit, platform):
    page = open_form(visit)
    page.click("[data-view=yaml]")
    good = page.input_value("#yaml")
    page.fill("#yaml", "name: [1\n")
    page.wait_for_selector("#problems >> text=not valid YAML at line")
    page.fill("#yaml", good.replace("batch_size:", "batchsize:"))
    page.wait_for_selector("#problems >> text=Did you mean batch_size?")
    page.click("text=Go to the line")
    start, end = page.evaluate("[yaml.selectionStart, yaml.selectionEnd]")
    assert page.input_value("#yaml")[start:end].strip().startswith("batchsize:")
    assert page.get_attribute("#send", "aria-disabled") == "true"


def test_a_fork_starts_from_the_other_runs_spec(visit, two_runs):
    page = open_form(visit, f"/runs/new?from={two_runs[0]}")
    assert page.input_value("[data-path=name]") == "letters sequential fork"
    assert page.is_checked("input[value=sequential]")
    assert page.input_value("[data-path='budget.target_reward']") == "1"
    page.fill("[data-path=seed]", "5")
    page.wait_for_selector("#changes >> text=1 change")

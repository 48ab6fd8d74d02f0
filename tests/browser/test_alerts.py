"""Alerts where people see them: the run's head, its events, the runs table, the bell, the list, and a team's settings."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from oppo_platform import clock
from oppo_platform.accounts.models import Membership

pytestmark = pytest.mark.browser

PHONE = {"width": 400, "height": 860}


def evaluate_runs():
    """A round of the housekeeper."""
    from oppo_platform.alerts.evaluator import evaluate_runs

    return evaluate_runs()


def only_kl_shows_its_threshold(page, run_id):
    page.goto(f"/runs/{run_id}")
    page.wait_for_selector("#plot-kl >> text=alert above 0.500")
    assert page.evaluate("document.getElementById('plot-kl')._fullLayout.yaxis.range[1]") > 0.5
    assert page.locator("#plot-bubble >> text=alert above").count() == 0, "far from its threshold of 80 %"


def test_an_alert_opens_on_the_page_and_somebody_takes_care_by_keyboard(visit, platform):
    from oppo_platform.alerts.policy import Condition, Rule
    from oppo_platform.alerts.rules import set_rules

    team = platform.project.team
    set_rules(platform.user, team, {Condition.KL_ABOVE: Rule(True, 0.5, 5)})
    evaluate_runs()  # what other tests have left to tell
    visitor = visit(color_scheme="dark")
    page = visitor.page
    run_id = platform.submit("letters alarmed", steps=40)
    supervisor, story = platform.start(run_id)
    page.goto(f"/runs/{run_id}/events")
    page.wait_for_selector("#events .pill[data-state=running]")
    before = int(page.inner_text("[data-count]"))
    supervisor.tell(list(story.tell(30)))
    assert evaluate_runs() == 1
    page.wait_for_selector("#run .open-alerts >> text=nats per sequence, mean of the last 5 steps")
    page.wait_for_function(f"() => document.querySelector('[data-count]').textContent === '{before + 1}'")
    page.wait_for_selector("#events tr[data-kind=alert] >> text=KL above")
    only_kl_shows_its_threshold(page, run_id)
    page.set_viewport_size(PHONE)
    visitor.fits()
    page.goto("/runs")
    page.wait_for_selector("#rows .alert-mark")
    page.keyboard.press("g")
    page.keyboard.press("a")
    page.wait_for_url("**/alerts")
    page.wait_for_function("() => document.querySelector('.bell-count').hidden")  # who looks has seen it
    page.focus("[data-acknowledge]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#rows >> text=acknowledged by mira")
    visitor.fits()
    page.click("#rows a.strong")
    page.wait_for_selector(".open-alerts >> text=acknowledged by mira")
    page.click("text=silence alerts")
    page.wait_for_selector("#run >> text=alerts silenced")
    page.wait_for_selector("#events tr[data-kind=alert_closed] >> text=mira silenced the run")
    expect(page.locator(".open-alerts")).to_be_hidden()


def test_the_bell_counts_what_needs_somebody_and_opens_it(visit, platform):
    evaluate_runs()  # what other tests have left to tell
    page = visit().page
    page.goto("/alerts")
    count = page.locator("[data-bell] .bell-count")
    expect(count).to_be_hidden()
    platform.trained("letters fine", steps=3)
    evaluate_runs()
    page.goto("/runs")
    expect(count).to_be_hidden()
    supervisor, story = platform.start(platform.submit("letters dead", steps=40))
    supervisor.tell(list(story.tell(2)))
    supervisor.end("failed", "RewardError: no score for the response")
    evaluate_runs()
    page.goto("/runs")
    expect(count.locator("[data-count]")).to_have_text("1")
    member = Membership.objects.filter(user=platform.user)
    [joined_at] = member.values_list("joined_at", flat=True)
    member.update(joined_at=clock.now())
    page.goto("/runs")
    expect(count, "alerts from before the user joined do not count").to_be_hidden()
    member.update(joined_at=joined_at)
    page.goto("/runs")
    page.click("[data-bell]")
    page.wait_for_selector("#rows tr:nth-child(1) >> text=RewardError: no score for the response")
    expect(count).to_be_hidden()
    page.goto("/runs")
    expect(count).to_be_hidden()


def test_a_run_that_dies_of_nan_is_told_in_the_list_and_rules_are_changed(visit, platform):
    visitor = visit()
    page = visitor.page
    run_id = platform.submit("letters broken", steps=40)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(3)))
    supervisor.end("failed", "NonFiniteError: the policy loss is nan at step 4 <script>window.pwned = 1</script>")
    evaluate_runs()
    page.goto("/alerts?show=all")
    page.wait_for_selector("#rows tr:nth-child(1) >> text=Failed")
    page.wait_for_selector("#rows tr:nth-child(2) >> text=Not finite")
    expect(page.locator("#rows tr:nth-child(2) .why")).to_contain_text("the policy loss is nan at step 4 <script>")
    assert page.evaluate("window.pwned") is None
    page.goto(f"/teams/{platform.project.team_id}/alerts")
    page.get_by_label("Threshold of KL above, nats per sequence").fill("30")
    page.get_by_label("Bubble above", exact=True).first.uncheck()
    page.click("text=Save rules")
    page.wait_for_selector(".banner >> text=changed")
    expect(page.get_by_label("Threshold of KL above, nats per sequence")).to_have_value("30")
    page.fill("#hook-url", "https://hooks.example.org/oppo")
    page.click("button >> text=Add webhook")
    page.wait_for_selector("#fresh-secret")
    assert page.input_value("#fresh-secret").startswith("whsec_")
    page.set_viewport_size(PHONE)
    visitor.fits()

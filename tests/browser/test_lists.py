"""The list of runs and the compare page."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from oppo_platform.projects.services import create_project
from tests.browser.test_pages import faults

pytestmark = pytest.mark.browser


def test_the_list_is_live_and_keeps_what_was_ticked(visit, platform, two_runs):
    page = visit().page
    page.goto("/runs")
    page.check(f"#rows input[value='{two_runs[0]}']")
    run_id = platform.submit("letters listed", steps=20)
    page.wait_for_selector("#rows >> text=letters listed")
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(6)))
    row = page.locator(f"#rows tr[data-key='{run_id}']")
    row.locator(".pill[data-state=running]").wait_for()
    row.locator("text=6 / 20").wait_for()
    expect(row.locator(".spark")).to_have_count(1)
    expect(page.locator(f"#rows input[value='{two_runs[0]}']")).to_be_checked()
    page.check(f"#rows input[value='{two_runs[1]}']")
    page.click("#compare")
    page.wait_for_url(f"**/compare?runs={two_runs[0]},{two_runs[1]}**")


def test_filters_by_state_and_project(visit, platform, two_runs):
    from oppo_platform.projects.models import Project

    empty = Project.objects.create(team=platform.project.team, name="empty", created_at=platform.project.created_at)
    page = visit().page
    page.goto(f"/runs?show=failed&project={empty.pk}")
    page.wait_for_selector("text=No run of this project is in this state.")
    page.goto(f"/runs?project={platform.project.pk}")
    page.click("text=Ended")
    page.wait_for_url("**show=ended**")
    page.wait_for_selector("#rows tr")
    ended = "all => all.length > 0 && all.every(p => ['succeeded', 'failed', 'cancelled'].includes(p.dataset.state))"
    assert page.locator("#rows .pill").evaluate_all(ended)  # this list gets only more of them


def test_the_filter_completes_complains_and_stays_in_the_address(visit, two_runs):
    page = visit().page
    page.goto("/runs?sort=name")
    page.keyboard.press("/")
    page.keyboard.type("preset:se")
    page.wait_for_selector("#filter-words li >> text=preset:sequential")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#rows tr[data-key='{two_runs[1]}']", state="detached")
    expect(page.locator("#filter")).to_have_value("preset:sequential ")
    expect(page.locator("#filter")).to_have_attribute("aria-expanded", "true")
    page.wait_for_url("**q=preset%3Asequential*")
    page.keyboard.press("Escape")  # closes the list of words, not the filter
    page.keyboard.type("rewrd>1")
    page.wait_for_selector("#filter-wrong >> text=Did you mean “reward”?")
    expect(page.locator(f"#rows tr[data-key='{two_runs[0]}']"), "what was found before stays").to_have_count(1)
    page.wait_for_url("**rewrd%3E1*")
    page.reload()
    expect(page.locator("#filter")).to_have_value("preset:sequential rewrd>1")
    page.fill("#filter", "-preset:sequential reward>-9")
    page.wait_for_selector(f"#rows tr[data-key='{two_runs[1]}']")
    page.wait_for_selector("#filter-wrong", state="hidden")
    expect(page.locator(f"#rows tr[data-key='{two_runs[0]}']")).to_have_count(0)
    sorts = page.locator("th[aria-sort=ascending] a")
    expect(sorts).to_have_attribute("href", re.compile(re.escape("?q=-preset%3Asequential+reward%3E-9&sort=-name") + "$"))
    page.fill("#filter", "no such run")
    page.wait_for_selector("#none-match", state="visible")


def test_ticked_runs_are_tagged_and_found_by_it(visit, two_runs):
    page = visit().page
    page.goto("/runs")
    for run_id in two_runs:
        page.check(f"#rows input[value='{run_id}']")
    page.click("[data-bulk=tag]")
    page.keyboard.type("pair first")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Tags of 2 runs changed")
    page.locator(f"#rows tr[data-key='{two_runs[0]}'] .tag >> text=pair").click()
    page.wait_for_url("**/runs?q=tag:pair")
    page.wait_for_function("() => document.querySelectorAll('#rows tr').length === 2")
    page.check(f"#rows input[value='{two_runs[0]}']")
    page.click("[data-bulk=cancel]")
    page.wait_for_selector("text=1 of the selected runs have already ended.")
    expect(page.locator("#bulk-confirm")).to_be_disabled()


def test_columns_are_chosen_by_keyboard_and_mouse_and_one_run_is_pinned(visit, two_runs):
    visitor = visit()
    page = visitor.page
    page.goto("/runs?q=preset:oppo,sequential")
    page.click("[data-dialog=columns-dialog]")
    page.fill("#columns-add", "batch_s")
    page.wait_for_selector("#columns-words li >> text=ppo.batch_size")
    assert faults(page) == []
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.click("[aria-label='Move left: ppo.batch_size']")
    for _ in range(10):
        page.keyboard.press("Enter")  # the button keeps the focus
    for title in ("Curve", "Preset", "Project", "Owner"):
        page.click(f"[aria-label='Remove {title}']")
    page.drag_and_drop("#columns-list li[data-key=kl]", "#columns-list li[data-key=state]", target_position={"x": 20, "y": 3})
    page.fill("#columns-add", "nonsense")
    page.keyboard.press("Enter")
    page.wait_for_selector("#columns-status >> text=There is no column “nonsense”")
    page.click("#columns-show")
    page.wait_for_url("**cols=ppo.batch_size,kl,state,step,reward,bubble,time,submitted")
    for place, title in enumerate(("Name", "ppo.batch_size", "KL"), start=1):
        expect(page.locator("thead th").nth(place)).to_have_text(title)
    page.check(f"#rows input[value='{two_runs[0]}']")
    page.click("#pin")
    page.wait_for_selector(f"#rows tr:first-child[data-pinned][data-key='{two_runs[0]}']")
    page.wait_for_selector(f"#rows tr[data-key='{two_runs[1]}'] td[data-col=reward] .delta")
    page.click("#pin >> text=Unpin")
    page.wait_for_selector("#rows tr[data-pinned]", state="detached")
    page.set_viewport_size({"width": 400, "height": 860})
    visitor.fits()


def test_a_view_is_saved_chosen_as_default_deleted_and_brought_back(visit, two_runs):
    page = visit().page
    page.goto("/runs?q=preset:oppo&sort=-reward&cols=state,reward")
    page.click("#views summary")
    page.click("#view-save")
    assert faults(page) == []
    page.fill("#view-name", "best of OPPO")
    page.keyboard.press("Enter")
    page.wait_for_url("**&view=*")
    page.click("#views summary >> text=best of OPPO")
    assert faults(page) == []
    page.click("[aria-label='Make best of OPPO the default view']")
    page.wait_for_selector("text=best of OPPO is your default view")
    page.click("[aria-label='Rename best of OPPO']")
    page.fill("#view-name", "best")
    page.click("#view-sure")
    page.wait_for_function("() => document.querySelector('#views summary').textContent.trim() === 'best'")
    page.goto("/runs")
    page.wait_for_url("**sort=-reward&cols=state,reward&view=*")
    page.click("#views summary")
    page.click("[aria-label='Delete best']")
    page.click(".toast >> text=Undo")
    page.wait_for_selector("#views-list >> text=best")
    page.click("[aria-label='Make best the default view']")
    page.wait_for_selector("text=All runs is your default view")
    page.click("[aria-label='Delete best']")
    page.wait_for_selector(".toast >> text=best deleted")
    page.keyboard.press("Escape")
    page.wait_for_function("() => !document.getElementById('views').open")


def test_two_runs_side_by_side(visit, two_runs):
    sequential, oppo = two_runs
    page = visit().page
    page.goto(f"/compare?runs={sequential},{oppo}")
    page.wait_for_selector("#plot-reward .main-svg")
    figures = page.locator("#figures tr")
    expect(figures.nth(0)).to_contain_text("baseline")
    speedup = float(figures.nth(1).locator("td").nth(3).inner_text().rstrip("×"))
    assert speedup > 1
    expect(page.locator("#diff tr")).to_have_count(2)
    expect(page.locator("#diff")).to_contain_text("overlap.inter_step")
    named = "() => document.getElementById('plot-reward').data.map(t => t.name).filter(Boolean).join()"
    page.wait_for_function(f"() => ({named})() === 'letters sequential #{sequential},letters oppo #{oppo}'")
    page.click("[data-axis=step]")
    page.wait_for_function("() => Math.max(...document.getElementById('plot-reward').data[0].x) === 60")
    page.fill("#target", "1.4")
    page.press("#target", "Enter")
    page.wait_for_selector("#target-now >> text=1.40")
    page.wait_for_url(f"**runs={sequential},{oppo}&x=step&target=1.4**")
    page.fill("#target", "99")
    page.press("#target", "Enter")
    page.wait_for_selector("#figures >> text=not reached")


def test_runs_are_picked_and_removed(visit, two_runs):
    sequential, oppo = two_runs
    page = visit().page
    page.goto("/compare")
    page.select_option("#add", str(sequential))
    page.wait_for_selector("#figures tr")
    page.select_option("#add", str(oppo))
    page.wait_for_function("() => document.querySelectorAll('#figures tr').length === 2")
    page.click(f"[aria-label='Remove letters sequential #{sequential}']")
    page.wait_for_function("() => document.querySelectorAll('#figures tr').length === 1")
    expect(page.locator("#figures")).to_contain_text("letters oppo")
    expect(page.locator(f"#add option[value='{oppo}']")).to_be_disabled()
    page.click(f"[aria-label='Remove letters oppo #{oppo}']")
    expect(page.locator("#result")).to_be_hidden()


def test_neither_a_failed_run_nor_a_long_project_name_takes_a_column_from_the_table(visit, platform, monkeypatch):
    long_name = "Alignment of the summarization models with human preferences, second half of 2026"
    monkeypatch.setattr(platform, "project", create_project(platform.user, platform.project.team, long_name))
    run_id = platform.submit("llama3/8b lr=1e-5 β", steps=20)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(2)))
    reason = "CUDA out of memory. Tried to allocate 20.00 GiB (GPU 0; 79.15 GiB total capacity; 61.01 GiB already allocated)"
    supervisor.end("failed", reason)
    visitor = visit()
    page = visitor.page
    page.goto("/runs")
    row = page.locator(f"#run-{run_id}")
    expect(row.locator("[data-col=name]")).to_contain_text("llama3/8b lr=1e-5 β")
    expect(row.locator("[data-col=name] .sub")).to_have_attribute("title", reason)
    expect(row.locator("[data-col=project]")).to_have_attribute("title", long_name)
    wrap, last = page.locator(".table-wrap:has(#rows)").bounding_box(), row.locator("td").last.bounding_box()
    assert last["x"] + last["width"] <= wrap["x"] + wrap["width"] + 1, "the last column is seen without scrolling"
    page.fill("#filter", f"#{run_id}")
    page.wait_for_function("() => document.querySelectorAll('#rows tr').length === 1")
    page.fill("#filter", "colour:red size>3")
    expect(page.locator("#filter-wrong")).to_contain_text("colour")
    expect(page.locator("#filter-wrong")).to_contain_text("size")


@pytest.mark.parametrize("width", [1024, 390])
def test_every_column_of_the_runs_table_is_reached_on_a_smaller_screen(visit, two_runs, width):
    visitor = visit(viewport={"width": width, "height": 800})
    page = visitor.page
    page.goto(f"/runs?q=%23{two_runs[0]}")
    wrap, row = page.locator(".table-wrap:has(#rows)"), page.locator(f"#run-{two_runs[0]}")
    page.wait_for_selector(f"#run-{two_runs[0]}")
    visitor.fits()
    edge = wrap.bounding_box()
    hidden = row.locator("td:visible").last.bounding_box()["x"] >= edge["x"] + edge["width"]
    assert hidden == (width == 1024), "a phone has one column, a card for each run"
    assert hidden == (wrap.get_attribute("tabindex") is not None), "a table that scrolls can be focused"
    if hidden:
        expect(wrap).to_have_accessible_name("Runs, scrolls sideways")
        strip = {"x": edge["x"] + edge["width"] - 14, "y": row.bounding_box()["y"] + 2, "width": 12, "height": 4}
        shaded = page.screenshot(clip=strip)
        wrap.evaluate("node => { node.style.background = getComputedStyle(node).backgroundColor; }")
        assert page.screenshot(clip=strip) != shaded, "a shadow shows that the table goes on"
    for cell in row.locator("td:visible").all():
        cell.scroll_into_view_if_needed()
        expect(cell).to_be_in_viewport(ratio=0.9)


def test_runs_of_one_name_are_told_apart_by_their_numbers(visit, platform):
    twins = [platform.trained("twins", steps=6), platform.trained("twins", steps=6)]
    page = visit().page
    page.goto(f"/compare?runs={twins[0]},{twins[1]}")
    page.wait_for_selector("#legend li >> nth=1")
    for run_id in twins:
        for place in ("#tokens", "#legend", "#values", "#figures", "#baseline"):
            expect(page.locator(place)).to_contain_text(f"twins #{run_id}")
    page.keyboard.press("Control+k")
    page.keyboard.type("twins")
    for run_id in twins:
        expect(page.locator("dialog.palette").get_by_role("option", name=f"twins #{run_id}")).to_be_visible()
    page.goto("/runs?q=twins")
    for run_id in twins:
        expect(page.locator(f"#run-{run_id} [data-col=name] .run-id")).to_have_text(f"#{run_id}")
    page.goto(f"/runs/{twins[1]}")
    expect(page.locator("h1")).to_have_text(f"twins #{twins[1]}")
    page.goto(f"/runs/new?from={twins[1]}")
    expect(page.locator(".page-head")).to_contain_text(f"forked from twins #{twins[1]}")


def test_runs_of_the_list_have_a_colour_or_a_pattern_of_their_own(visit, platform):
    for n in range(9):
        platform.submit(f"letters row {n}", steps=20)
    page = visit().page
    page.goto("/runs")
    page.wait_for_selector("#rows tr")
    looks = page.locator("#rows .swatch-line").evaluate_all("all => all.map((e) => `${e.dataset.run} ${e.dataset.pattern}`)")
    assert len(looks) >= 9
    for first in range(len(looks) - 8):
        assert len(set(looks[first : first + 9])) == 9, "nine runs that were submitted one after the other look different"


def test_dialogs_tell_runs_of_one_name_apart(visit, platform):
    twins = [platform.trained("gemini", steps=6), platform.trained("gemini", steps=6)]
    labels = [f"gemini #{run_id}" for run_id in twins]
    visitor = visit()
    page = visitor.page
    page.goto("/runs?q=gemini")
    for label in labels:
        page.check(f"[aria-label='Select {label}']")
    page.click("[data-bulk=delete]")
    expect(page.locator("#bulk-words")).to_contain_text(f"{labels[1]}, {labels[0]}: they move to the team’s trash")
    visitor.expects("409")  # a browser logs the status of a request itself
    refusal = {"status": 409, "json": {"code": "conflict", "detail": "Not now."}}
    page.route(f"**/api/v1/runs/{twins[0]}", lambda route: route.fulfill(**refusal))
    page.click("#bulk-confirm")
    expect(page.locator("#bulk-status li")).to_have_text(f"{labels[0]}: Not now.")
    page.goto(f"/runs/{twins[1]}")
    expect(page.locator("h1")).to_have_text(labels[1])
    expect(page.locator("h2 >> text=In trash")).to_be_visible()

    held = platform.submit("gemini", steps=20)
    platform.start(held)
    page.goto("/queue")
    expect(page.locator(".gang")).to_contain_text(f"gemini#{held}")
    assert faults(page) == []
    page.goto(f"/runs/{held}")
    page.click("[data-wish=cancel]")
    expect(page.locator("#wish-title")).to_have_text(f"Cancel gemini #{held}?")

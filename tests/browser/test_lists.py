"""The list of runs and the compare page."""

from __future__ import annotations

import pytest

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
    assert row.locator(".spark").count() == 1
    assert page.is_checked(f"#rows input[value='{two_runs[0]}']")
    page.check(f"#rows input[value='{two_runs[1]}']")
    page.click("#compare")
    page.wait_for_url(f"**/compare?runs={two_runs[0]},{two_runs[1]}**")


def test_filters_by_state_and_project(visit, platform, two_runs):
    from oppo_platform.runs.models import Project

    empty = Project.objects.create(team=platform.project.team, name="empty", created_at=platform.project.created_at)
    page = visit().page
    page.goto(f"/runs?show=failed&project={empty.pk}")
    page.wait_for_selector("text=Nothing here")
    page.goto(f"/runs?project={platform.project.pk}")
    page.click("text=Ended")
    page.wait_for_selector("#rows tr")
    assert page.locator("#rows .pill").evaluate_all(
        "all => all.every(p => ['succeeded', 'failed', 'cancelled'].includes(p.dataset.state))"
    )


def test_the_filter_completes_complains_and_stays_in_the_address(visit, two_runs):
    page = visit().page
    page.goto("/runs?sort=name")
    page.keyboard.press("/")
    page.keyboard.type("preset:se")
    page.wait_for_selector("#filter-words li >> text=preset:sequential")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#rows tr[data-key='{two_runs[1]}']", state="detached")
    assert page.input_value("#filter") == "preset:sequential "
    assert page.get_attribute("#filter", "aria-expanded") == "true"
    page.wait_for_url("**q=preset%3Asequential*")
    page.keyboard.press("Escape")  # closes the list of words, not the filter
    page.keyboard.type("rewrd>1")
    page.wait_for_selector("#filter-wrong >> text=Did you mean “reward”?")
    assert page.locator(f"#rows tr[data-key='{two_runs[0]}']").count() == 1, "what was found before stays"
    page.reload()
    assert page.input_value("#filter") == "preset:sequential rewrd>1"
    page.fill("#filter", "-preset:sequential reward>-9")
    page.wait_for_selector(f"#rows tr[data-key='{two_runs[1]}']")
    page.wait_for_selector("#filter-wrong", state="hidden")
    assert page.locator(f"#rows tr[data-key='{two_runs[0]}']").count() == 0
    assert page.get_attribute("th[aria-sort=ascending] a", "href").endswith("?q=-preset%3Asequential+reward%3E-9&sort=-name")
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
    page.wait_for_selector("text=1 of those ticked ended already.")
    assert page.is_disabled("#bulk-confirm")


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
    page.wait_for_selector("#columns-told >> text=There is no column “nonsense”")
    page.click("#columns-show")
    page.wait_for_url("**cols=ppo.batch_size,kl,state,step,reward,bubble,time,submitted")
    assert page.locator("thead th").all_inner_texts()[1:4] == ["Name", "ppo.batch_size", "KL"]
    page.check(f"#rows input[value='{two_runs[0]}']")
    page.click("#pin")
    page.wait_for_selector(f"#rows tr:first-child[data-pinned][data-key='{two_runs[0]}']")
    page.wait_for_selector(f"#rows tr[data-key='{two_runs[1]}'] td[data-col=reward] .delta")
    page.click("#pin >> text=Unpin")
    page.wait_for_selector("#rows tr[data-pinned]", state="detached")
    page.set_viewport_size({"width": 400, "height": 860})
    assert visitor.overflow() <= 0


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
    page.click("[aria-label='Begin with best of OPPO']")
    page.wait_for_selector("text=Your table of runs begins with best of OPPO")
    page.click("[aria-label='Rename best of OPPO']")
    page.fill("#view-name", "best")
    page.click("#view-sure")
    page.wait_for_function("() => document.querySelector('#views summary').textContent.trim() === 'best'")
    page.goto("/runs")
    assert "sort=-reward&cols=state,reward&view=" in page.url
    page.click("#views summary")
    page.click("[aria-label='Delete best']")
    page.click(".toast >> text=Undo")
    page.wait_for_selector("#views-list >> text=best")
    page.click("[aria-label='Begin with best']")
    page.wait_for_selector("text=begins with all runs")
    page.click("[aria-label='Delete best']")
    page.wait_for_selector(".toast >> text=best is deleted")
    page.keyboard.press("Escape")
    assert page.evaluate("document.getElementById('views').open") is False


def test_two_runs_side_by_side(visit, two_runs):
    sequential, oppo = two_runs
    page = visit().page
    page.goto(f"/compare?runs={sequential},{oppo}")
    page.wait_for_selector("#plot-reward .main-svg")
    figures = page.locator("#figures tr")
    assert "baseline" in figures.nth(0).inner_text()
    speedup = float(figures.nth(1).locator("td").nth(3).inner_text().rstrip("×"))
    assert speedup > 1
    assert page.locator("#diff tr").count() == 2
    assert "overlap.inter_step" in page.inner_text("#diff")
    names = page.evaluate("document.getElementById('plot-reward').data.map(t => t.name).filter(Boolean)")
    assert names == ["letters sequential", "letters oppo"]
    page.click("[data-axis=step]")
    page.wait_for_function("() => Math.max(...document.getElementById('plot-reward').data[0].x) === 60")
    page.fill("#target", "1.4")
    page.press("#target", "Enter")
    page.wait_for_selector("#target-now >> text=1.40")
    assert f"runs={sequential},{oppo}&x=step&target=1.4" in page.url
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
    page.click("[aria-label='Remove letters sequential']")
    page.wait_for_function("() => document.querySelectorAll('#figures tr').length === 1")
    assert "letters oppo" in page.inner_text("#figures")
    assert page.locator(f"#add option[value='{oppo}']").is_disabled()

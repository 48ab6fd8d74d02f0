"""Charts, form, lists and undo without a mouse: Tab reaches every control, and the focus is never lost."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from oppo_platform.alerts.models import Webhook
from oppo_platform.projects.models import ChartLayout
from oppo_platform.runs.models import Run

pytestmark = pytest.mark.browser

MOST_TABS = 150
READY = "#send[aria-disabled=false]"
FOCUSED = """([selector, name]) => {
  const focused = document.activeElement;
  const label = focused.getAttribute("aria-label") || focused.textContent.trim();
  return focused.matches(selector) && (!name || label === name);
}"""


def tab_to(page, selector, name="", key="Tab"):
    """Press Tab until an element with this selector, and accessible name if given, has the focus."""
    for _ in range(MOST_TABS):
        page.keyboard.press(key)
        if page.evaluate(FOCUSED, [selector, name]):
            return
    raise AssertionError(f"{key} does not reach {selector} {name}")


def press(page, selector, name="", key="Tab"):
    tab_to(page, selector, name, key)
    page.keyboard.press("Enter")


def focus_is_kept(page):
    assert page.evaluate("document.activeElement !== document.body"), "the focus was lost"


@pytest.fixture
def charts(visit, platform):
    """The page of a run whose metrics are drawn, without pinned charts."""
    ChartLayout.objects.all().delete()
    page = visit().page
    page.goto(f"/runs/{platform.trained('charts by keyboard', steps=4)}")
    page.wait_for_selector("#metric-groups .metric >> nth=3", state="attached")
    yield page
    ChartLayout.objects.all().delete()


def pin_from_search(page, key):
    tab_to(page, "#metric-search")
    page.keyboard.press("Control+a")
    page.keyboard.type(f"^{key}$")
    expect(page.locator("#metric-count")).to_have_text(re.compile("^1 of"))
    expect(page.locator("#metric-groups .metric:not([hidden]) h3")).to_have_text(key)
    press(page, "summary", f"Actions for {key}")
    press(page, ".menu-body button", "Pin")
    expect(page.locator("#pinned-charts h3").last).to_have_text(key)
    focus_is_kept(page)


def test_a_metric_is_found_and_pinned_and_a_chart_of_several_made(charts):
    page = charts
    pin_from_search(page, "actor/entropy")
    press(page, "#pinned-new", key="Shift+Tab")
    expect(page.locator("#chart-key")).to_be_focused()
    for typed in ("vf_lo", "objective/kl"):
        page.keyboard.type(typed)
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
    press(page, "#chart-keys button", "Move up: objective/kl")
    expect(page.locator("#chart-keys span")).to_have_text(["objective/kl", "critic/vf_loss"])
    tab_to(page, "#chart-log")
    page.keyboard.press("Space")
    press(page, "#chart-save")
    expect(page.locator("#pinned-charts h3").last).to_have_text("objective/kl, critic/vf_loss")
    focus_is_kept(page)


def test_pinned_charts_are_moved_drawn_large_and_unpinned(charts):
    page, names = charts, charts.locator("#pinned-charts h3")
    for key in ("actor/pg_clipfrac", "timing_s/step"):
        pin_from_search(page, key)
    tab_to(page, "#pinned-new", key="Shift+Tab")
    press(page, "#pinned-charts summary", "Actions for timing_s/step")
    press(page, ".menu-body button", "Move left")
    expect(names.last).to_have_text("actor/pg_clipfrac")
    page.keyboard.press("Enter")  # the moved chart's menu has the focus
    press(page, ".menu-body button", "Full screen")
    expect(page.locator("dialog.full h3")).to_have_text("timing_s/step")
    page.keyboard.press("ArrowRight")
    expect(page.locator("dialog.full h3")).to_have_text("actor/pg_clipfrac")
    page.keyboard.press("Escape")
    expect(page.locator("dialog.full")).to_have_count(0)
    expect(page.locator("#pinned-charts summary[aria-label='Actions for timing_s/step']")).to_be_focused()
    page.keyboard.press("Enter")
    press(page, ".menu-body button", "Unpin")
    expect(page.locator("#pinned-new")).to_be_focused()
    press(page, ".toast button", "Undo", key="Shift+Tab")
    expect(names.last).to_have_text("actor/pg_clipfrac")
    expect(names.nth(-2)).to_have_text("timing_s/step")


def test_pinned_charts_are_edited_shared_and_dropped(charts):
    page, names = charts, charts.locator("#pinned-charts h3")
    pin_from_search(page, "actor/entropy")
    press(page, "#pinned-share", key="Shift+Tab")
    expect(page.locator("#pinned-whose")).to_have_text("for everyone in the project")
    focus_is_kept(page)
    pin_from_search(page, "actor/pg_clipfrac")
    tab_to(page, "#pinned-new", key="Shift+Tab")
    press(page, "#pinned-charts summary", "Actions for actor/pg_clipfrac")
    press(page, ".menu-body button", "Edit")
    expect(page.locator("#chart-key")).to_be_focused()
    tab_to(page, "#chart-title", key="Shift+Tab")
    page.keyboard.type("clipped")
    press(page, "#chart-save")
    expect(names).to_have_text(["actor/entropy", "clipped"])
    focus_is_kept(page)
    press(page, "#pinned-reset", key="Shift+Tab")
    expect(names).to_have_text(["actor/entropy"])
    focus_is_kept(page)


def test_a_pinned_charts_menu_stays_open_while_a_late_save_is_answered(charts):
    """The answer holds what the page already shows, so nothing is drawn anew under the user's hands."""
    page, held = charts, []
    pin_from_search(page, "actor/entropy")
    expect(page.locator(".toast")).to_contain_text("pinned")
    page.route(re.compile(r"/projects/\d+/charts$"), lambda route: held.append(route))
    pin_from_search(page, "actor/pg_clipfrac")
    tab_to(page, "#pinned-new", key="Shift+Tab")
    press(page, "#pinned-charts summary", "Actions for actor/pg_clipfrac")
    tab_to(page, ".menu-body button", "Move left")
    with page.expect_response(re.compile(r"/projects/\d+/charts$")):
        held[0].continue_()
    expect(page.locator(".toast", has_text="actor/pg_clipfrac pinned")).to_be_visible()
    assert page.evaluate(FOCUSED, [".menu-body button", "Move left"])


def test_a_charts_menu_is_filled_before_the_next_key(charts):
    """Read in the same task as the click: the browser fires `toggle` only in a later one, which a fast Tab comes before."""
    entries = "(summary) => { summary.click(); return [...summary.nextSibling.children].map((node) => node.textContent); }"
    first = charts.locator("#metric-groups summary[aria-label]").first
    assert first.evaluate(entries) == ["Pin", "Full screen", "Logarithmic axis"]


def test_a_run_is_submitted_and_its_name_changed(visit, platform):
    page = visit().page
    page.goto("/runs/new")
    page.wait_for_selector("input[name=preset]:checked")
    tab_to(page, "input[name=preset]")
    page.keyboard.press("ArrowUp")  # from OPPO
    tab_to(page, "[data-path=name]")
    page.keyboard.press("Control+a")
    page.keyboard.type("llama3/8b lr=1e-5 β")
    tab_to(page, "#tags")
    page.keyboard.type("walked")
    tab_to(page, "[data-path='models.actor']")
    page.keyboard.type("letters/actor")
    page.wait_for_selector(READY)
    press(page, "#send")
    page.wait_for_url(re.compile(r"/runs/\d+$"))
    run = Run.objects.order_by("-id").first()
    assert (run.preset, run.tags) == ("sequential", ["walked"])
    press(page, "[data-dialog=labels-dialog]")
    expect(page.locator("#labels-dialog")).to_be_visible()
    tab_to(page, "#label-name")
    page.keyboard.press("End")
    page.keyboard.type(" 2")
    press(page, "#labels-save")
    expect(page.locator("h1")).to_contain_text("llama3/8b lr=1e-5 β 2")


def test_samples_side_by_side_are_ordered_filtered_and_downloaded(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/samples/side-by-side?held_out=false")
    page.wait_for_selector("#prompts article")
    tab_to(page, "#q")
    page.keyboard.type("a")
    tab_to(page, "#steps button")
    tab_to(page, "#add-step")
    tab_to(page, "select[name=sort]")
    page.keyboard.press("ArrowDown")
    page.wait_for_url("**sort=best**")
    tab_to(page, "[name=min_score]")
    page.keyboard.type("-100")
    tab_to(page, "[name=ending]")
    page.wait_for_url("**min_score=-100**")
    page.wait_for_selector("#download[href*='sort=best'][href*='min_score=-100']")
    tab_to(page, "#download")
    with page.expect_download():
        page.keyboard.press("Enter")
    tab_to(page, "#prompts article a")


def test_compared_runs_are_removed_one_after_the_other(visit, two_runs):
    page = visit().page
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}")
    page.wait_for_selector("#plot-reward .main-svg >> nth=0")
    tab_to(page, "#tokens button", f"Remove letters sequential #{two_runs[0]}")
    page.evaluate("() => { window.was = document.activeElement; }")
    for _ in range(2):
        with page.expect_response("**/api/v1/compare?*"):
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(page.locator("#result")).to_be_visible()
    assert page.evaluate("window.was.isConnected && document.activeElement === window.was"), "unchanged tokens stay"
    page.keyboard.press("Enter")
    assert page.evaluate(FOCUSED, ["#tokens button", f"Remove letters oppo #{two_runs[1]}"])
    page.keyboard.press("Enter")
    expect(page.locator("#tokens button")).to_have_count(0)
    expect(page.locator("#add")).to_be_focused()


def test_charts_are_added_to_a_comparison_and_removed(visit, two_runs):
    page = visit().page
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}&x=step")
    page.wait_for_selector("#plot-reward .main-svg >> nth=0")
    tab_to(page, "#chart-add")
    page.keyboard.type("vf_lo")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**&charts=critic/vf_loss")
    page.wait_for_selector("#more-charts .main-svg >> nth=0")
    focus_is_kept(page)
    press(page, "#more-charts button", "critic/vf_loss on a logarithmic axis")
    page.wait_for_url("**&log=critic/vf_loss")
    assert page.evaluate(FOCUSED, ["#more-charts button[aria-pressed=true]", "critic/vf_loss on a logarithmic axis"])
    press(page, "#more-charts button", "Remove critic/vf_loss")
    expect(page.locator("#more-charts > *")).to_have_count(0)
    expect(page.locator("#chart-add")).to_be_focused()


def test_a_step_is_removed_from_samples_side_by_side(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/samples/side-by-side?held_out=false&steps=3,5,7")
    buttons = page.locator("#steps button")
    expect(buttons).to_have_count(3)
    for removed, next_one in (("Remove step 5", "Remove step 7"), ("Remove step 7", "")):
        tab_to(page, "#steps button", removed)
        page.keyboard.press("Enter")
        expect(page.locator(f"#steps button[aria-label='{removed}']")).to_have_count(0)
        assert page.evaluate(FOCUSED, ["#steps button" if next_one else "#add-step", next_one])
        page.keyboard.press("Shift+Tab")  # the next token is reached by Tab again


def two_pages_of_one_row(page, path):
    """Let a list have two pages of one row."""

    def answer(route):
        reply = route.fetch(url=re.sub(r"limit=\d+", "limit=1", route.request.url))
        route.fulfill(response=reply, json={**reply.json(), **({"next": None} if "cursor=" in route.request.url else {})})

    page.route(re.compile(rf"/{path}\?.*limit="), answer)


@pytest.mark.parametrize(
    ("tab", "path", "rows", "first"),
    [
        ("samples", "samples", "#rows tr[data-id]", ".opener"),
        ("samples/side-by-side?held_out=false", "compare/samples", "#prompts article", ""),
        ("events?keeps=true", "events", "#events tr", ""),
    ],
)
def test_after_the_last_page_the_first_new_row_has_the_focus(visit, two_runs, tab, path, rows, first):
    page = visit().page
    two_pages_of_one_row(page, path)
    page.goto(f"/runs/{two_runs[1]}/{tab}")
    expect(page.locator(rows)).to_have_count(1)
    press(page, "#more")
    expect(page.locator("#more")).to_be_hidden()
    row = page.locator(rows).nth(1)
    expect(row.locator(first) if first else row).to_be_focused()


def test_newer_samples_are_loaded_and_have_the_focus(visit, platform):
    run_id = platform.submit("letters fresh", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(4)))
    page = visit().page
    for tab, first in (("samples", "#rows .opener"), ("samples/side-by-side?held_out=false", "#prompts article")):
        page.goto(f"/runs/{run_id}/{tab}")
        page.wait_for_selector(first)
        supervisor.tell(list(story.tell(1)))
        page.locator("#fresh").wait_for()
        press(page, "#fresh")
        expect(page.locator("#fresh")).to_be_hidden()
        expect(page.locator(first).first).to_be_focused()


def test_alerts_are_silenced_and_a_run_archived_by_the_same_button(visit, platform):
    from oppo_platform.runs.lifecycle import cancel_run

    page = visit().page
    run_id = platform.submit("letters quiet", steps=5)
    page.goto(f"/runs/{run_id}")
    expect(page.locator(".pill[data-state=queued]").first).to_be_visible()
    silence, archived = (page.locator(f"[data-part={name}]") for name in ("silence", "archived"))
    press(page, "button", "silence alerts")
    expect(silence).to_have_text(" · alerts silenced unsilence")
    expect(silence.locator("button")).to_be_focused()
    page.keyboard.press("Enter")
    expect(silence).to_have_text(" · silence alerts")
    expect(silence.locator("button")).to_be_focused()
    cancel_run(run_id, "user:mira")
    expect(silence).to_have_text("")
    press(page, "button", "archive")
    expect(archived).to_have_text(" · archived unarchive")
    expect(archived.locator("button")).to_be_focused()


def test_a_range_of_runs_is_selected(visit, platform):
    for n in range(3):
        platform.submit(f"picked {n}", steps=3)
    page = visit().page
    page.goto("/runs?view=all&q=name:picked")
    expect(page.locator("#rows tr")).to_have_count(3)
    tab_to(page, "#rows input")
    page.keyboard.press("Space")
    tab_to(page, "#rows tr:nth-child(3) input")
    page.keyboard.press("Shift+Space")
    expect(page.locator("#picked")).to_have_text("3 runs selected.")


@pytest.fixture
def slack_webhook():
    """Address of a webhook that does not outlive the test."""
    yield (url := "https://hooks.slack.com/services/T0/B0/x")
    Webhook.objects.filter(url=url).delete()


def test_a_webhook_is_deleted_and_restored(visit, platform, slack_webhook):
    team = platform.project.team_id
    page = visit().page
    page.goto(f"/teams/{team}/alerts")
    tab_to(page, "#hook-url")
    page.keyboard.type(slack_webhook)
    press(page, "button", "Add webhook")
    page.wait_for_selector("#fresh-secret")
    press(page, "button", f"Delete the webhook to {slack_webhook}")
    press(page, "dialog[open] button", "Delete webhook")
    expect(page.locator(".banner")).to_contain_text("was deleted")
    webhook = page.locator(".hook-url", has_text=slack_webhook)
    expect(webhook).to_have_count(0)
    press(page, ".banner button", "Undo")
    expect(webhook).to_have_count(1)

"""Forms, samples, lists and undo without a mouse: Tab reaches every control, and the focus is never lost."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from oppo_platform.alerts.models import Webhook
from oppo_platform.runs.models import Run
from tests.browser.conftest import wait_until
from tests.browser.test_samples_side_by_side import evaluated

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


def test_groups_resources_and_limits_of_a_run_are_typed(visit, platform):
    page = visit().page
    page.goto("/runs/new")
    page.wait_for_selector(READY)
    tab_to(page, "input[name=preset]")
    while not page.is_checked("input[value=grpo]"):
        page.keyboard.press("ArrowDown")
    tab_to(page, "[data-path=name]")
    page.keyboard.press("Control+a")
    page.keyboard.type("letters limited")
    expect(page.locator("[data-path='ppo.group_size']")).to_be_enabled()
    typed = {
        "ppo.group_size": "4",
        "resources.nodes": "1",
        "resources.processes": "1",
        "queue.max_runtime_hours": "2.5",
        "queue.priority": "70",
    }
    for path, text in typed.items():
        tab_to(page, f"[data-path='{path}']")
        page.keyboard.press("Control+a")
        page.keyboard.type("9000" if path == "queue.priority" else text)
    expect(page.locator("[data-field='queue.priority'] .error")).to_be_visible()
    focus_is_kept(page)
    page.keyboard.press("Control+a")
    page.keyboard.type("70")
    page.wait_for_selector(READY)
    press(page, "#send")
    page.wait_for_url(re.compile(r"/runs/\d+$"))
    run = Run.objects.get(name="letters limited")
    assert (run.priority, run.max_runtime_s) == (70, 9000)
    assert (run.spec["ppo"]["algorithm"], run.spec["ppo"]["group_size"]) == ("grpo", 4)
    assert (run.spec["resources"]["nodes"], run.spec["resources"]["processes"]) == (1, 1)


@pytest.fixture(scope="module")
def long_samples(platform):
    """A run whose evaluations have responses that are too long for a card."""
    return evaluated(platform, "letters long", 0.2, respond=lambda step, n: f"day {step} " * 400)


def test_samples_side_by_side_are_bounded_and_the_filter_cleared(visit, long_samples):
    page = visit().page
    page.goto(f"/runs/{long_samples}/samples/side-by-side")
    cards = page.locator("#prompts article")
    expect(cards).to_have_count(3)
    for name, text in (("max_score", "100"), ("min_length", "1"), ("max_length", "900")):
        tab_to(page, f"[name={name}]")
        page.keyboard.type(text)
        page.wait_for_url(f"**{name}={text}**")
    tab_to(page, "[name=ending]")
    page.keyboard.press("l")  # a second letter begins a new search after one second
    page.wait_for_url("**ending=length**")
    expect(cards).to_have_count(1)
    expect(page.locator("[name=ending]")).to_be_focused()
    press(page, "#clear")
    expect(cards).to_have_count(3)
    expect(page.locator("#clear")).to_be_hidden()
    expect(page.locator("[name=ending]")).to_be_focused()
    tab_to(page, "#q", key="Shift+Tab")
    page.keyboard.type("nothing has this")
    expect(page.locator("#nothing")).to_be_visible()
    press(page, "#clear-too")
    expect(cards).to_have_count(3)
    expect(page.locator("[name=ending]")).to_be_focused()


def test_samples_side_by_side_of_one_prompt_and_of_more_steps(visit, long_samples):
    page = visit().page
    path = f"/runs/{long_samples}/samples/side-by-side"
    page.goto(f"{path}?steps=2,4")
    cards = page.locator("#prompts article")
    expect(cards).to_have_count(3)
    tab_to(page, "#add-step")
    page.keyboard.press("Space")
    for _ in range(page.locator("#add-step option").all_inner_texts().index("step 6")):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#steps .token")).to_have_text(["step 2×", "step 4×", "step 6×"])
    expect(page.locator("#add-step")).to_be_focused()
    for words in ("Show all", "Show less"):
        press(page, "#prompts button", words)
        expect(cards.first.locator(".card-foot button")).not_to_have_text(words)
        expect(cards.first.locator(".card-foot button")).to_be_focused()
        page.keyboard.press("Shift+Tab")
    tab_to(page, "[name=held_out]", key="Shift+Tab")
    page.keyboard.press("t")
    page.wait_for_url("**held_out=false**")
    expect(page.locator("[name=held_out]")).to_be_focused()
    page.goto(f"{path}?prompt={cards.first.get_attribute('data-prompt')}")
    expect(cards).to_have_count(1)
    press(page, "#one-prompt button")
    expect(cards).to_have_count(3)
    expect(page.locator("#q")).to_be_focused()


def test_a_step_is_added_once_although_its_key_is_pressed_again(visit, long_samples):
    page, held = visit().page, []
    page.goto(f"/runs/{long_samples}/samples/side-by-side?steps=2,4")
    tokens = page.locator("#steps .token")
    expect(tokens).to_have_count(2)
    page.route("**/compare/samples?*", lambda route: held.append(route))
    tab_to(page, "#add-step")
    for _ in range(2):  # the list still offers the step, since the page has no reply yet
        page.keyboard.press("ArrowDown")
    page.wait_for_url("**steps=2,4,latest**")
    wait_until(lambda: page.wait_for_timeout(20) or held, "the samples are not requested")
    for route in held:
        route.continue_()
    expect(tokens).to_have_text(["step 2×", "step 4×", "latest step×"])


def test_samples_side_by_side_of_training_are_shown_in_place_of_none(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/samples/side-by-side")
    page.wait_for_selector("#show-training")
    press(page, "#show-training")
    page.wait_for_selector("#prompts article")
    expect(page.locator("[name=held_out]")).to_be_focused()


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
    tab_to(page, "#hook-format")
    page.keyboard.press("D")
    press(page, "button", "Add webhook")
    page.wait_for_selector("#fresh-secret")
    expect(page.locator(".card-head", has_text=slack_webhook).locator(".tag")).to_have_text("Discord")
    press(page, "button", f"Delete the webhook to {slack_webhook}")
    press(page, "dialog[open] button", "Delete webhook")
    expect(page.locator(".banner")).to_contain_text("was deleted")
    webhook = page.locator(".hook-url", has_text=slack_webhook)
    expect(webhook).to_have_count(0)
    press(page, ".banner button", "Undo")
    expect(webhook).to_have_count(1)


def test_a_member_is_removed_and_restored(visit, platform):
    from oppo_platform.accounts.services import create_user
    from oppo_platform.accounts.teams import set_member

    team = platform.project.team
    create_user("ines", "ines@example.org")
    set_member(platform.user, team, "ines", "viewer")
    page = visit().page
    page.goto(f"/teams/{team.pk}")
    row = page.locator(".people tr", has_text="ines@example.org")
    for restored in (True, False):
        press(page, "button", "Remove ines")
        press(page, "dialog[open] button", "Remove from team")
        expect(row).to_have_count(0)
        if restored:
            press(page, ".banner button", "Undo")
            expect(row).to_have_count(1)


def test_a_run_is_chosen_in_the_palette_and_the_user_signs_out(visit, platform):
    older, _ = (platform.submit(f"palette {word}", steps=20) for word in ("older", "newer"))
    visitor = visit()
    visitor.expects("401")
    page = visitor.page
    page.goto("/queue")
    page.keyboard.press("Control+k")
    page.keyboard.type("palette")
    option = page.locator(".palette [role=option]", has_text=f"palette older #{older}")
    expect(option).to_be_visible()
    while option.get_attribute("aria-selected") == "false":
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{older}")
    press(page, ".account summary")
    press(page, ".account button", "Sign out")
    page.wait_for_url("**/accounts/login/**")


def test_requests_that_are_refused_while_the_user_signs_out_do_not_reload_the_page_at_once(visit):
    visitor = visit()
    visitor.expects("401")
    page = visitor.page
    page.goto("/queue")
    page.evaluate("() => { window.stays = true; document.addEventListener('submit', (e) => e.preventDefault()); }")
    press(page, ".account summary")
    press(page, ".account button", "Sign out")
    page.context.clear_cookies()
    read = "import('/static/js/core/api.js').then((api) => api.get('me')).catch((e) => e.status)"
    assert page.evaluate(read) == 401
    page.wait_for_load_state()
    assert page.evaluate("window.stays")
    page.wait_for_url("**/accounts/login/?next=/queue")  # later, because the form did not leave the page


def test_a_remedy_of_the_plan_is_used(visit, platform):
    page = visit().page
    page.goto("/runs/new")
    page.wait_for_selector(READY)
    press(page, "[data-view=yaml]")
    text = re.sub(r"micro_batch_tokens: \d+", "micro_batch_tokens: 65536", page.input_value("#yaml"))
    page.fill("#yaml", re.sub(r"batch_size: \d+", "batch_size: 64", text))
    page.wait_for_selector(".plan-remedy button")
    page.wait_for_selector(READY)
    press(page, ".plan-remedy button", "Use this")
    expect(page.locator(".plan-remedy")).to_have_count(0)
    expect(page.locator("#yaml")).to_have_value(re.compile(r"micro_batch_tokens: (?!65536)\d+"))
    expect(page.locator("#plan-memory")).to_be_focused()


def test_a_suggestion_at_a_field_is_used(visit, platform):
    page = visit().page
    page.goto("/runs/new")
    page.wait_for_selector(READY)
    press(page, "[data-view=yaml]")
    text = page.input_value("#yaml")
    prompts = re.search(r"^  prompts: (.*)$", text, re.M)[1]
    page.fill("#yaml", text.replace(f"prompts: {prompts}", f"prompts: {prompts}x"))
    page.wait_for_selector("[data-field='data.prompts'] .error button", state="attached")
    press(page, "[data-view=form]", key="Shift+Tab")
    press(page, "[data-field='data.prompts'] .error button", f"Use {prompts}")
    page.wait_for_selector(READY)
    expect(page.locator("[data-path='data.prompts']")).to_have_value(prompts)
    expect(page.locator("[data-path='data.prompts']")).to_be_focused()

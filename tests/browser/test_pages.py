"""Every page, light and dark, wide and on a phone: no console error, no policy violation, nothing wider than the window, nothing
that axe finds fault with, no request to anybody else."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from oppo_platform.pages.templatetags.oppo_format import figure

pytestmark = pytest.mark.browser

PHONE = {"viewport": {"width": 400, "height": 860}}
DESK = {"viewport": {"width": 1440, "height": 900}}
AXE = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "rules": {"label-content-name-mismatch": {"enabled": True}},  # who says what is written on a button means that button
    "resultTypes": ["violations"],
}


def faults(page, *, without=()):
    """What axe finds, a line each; `without` these rules."""
    rules = {**AXE["rules"], **{rule: {"enabled": False} for rule in without}}
    found = Axe().run(page, options={**AXE, "rules": rules}).response["violations"]
    return [f"{each['id']} ({each['impact']}): {[node['target'] for node in each['nodes']]}" for each in found]


# Whether something has the focus, whether that is marked, and whether it can be seen.
FOCUSED = """() => {
  const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
  const marked = (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0) || style.boxShadow !== 'none';
  return [at !== document.body, marked, box.width > 0 && box.height > 0];
}"""


def keys_lead_on(page):
    """Tab goes from one thing to the next, past the link that skips the navigation, and it can be seen where one is."""
    for _ in range(3):
        page.keyboard.press("Tab")
        assert page.evaluate(FOCUSED) == [True, True, True], page.url


def fits_the_narrowest(visitor):
    """Nothing is wider than 320 pixels, which is also a desk's window at 400 %."""
    visitor.page.set_viewport_size({"width": 320, "height": 700})
    visitor.fits()
    visitor.page.set_viewport_size(PHONE["viewport"])


def pages_of(team_id, sequential, oppo, trashed):
    """Address → what stands on it when its script has done its work."""
    return {
        "/runs": "#rows tr",
        "/runs/new": "#send[aria-disabled=false]",
        f"/runs/new?from={oppo}": "#changes:not(:empty)",
        "/queue": "#queue section",
        f"/runs/{oppo}": "#plot-reward .main-svg >> nth=0",
        f"/runs/{oppo}/timeline": "#worst li",
        f"/runs/{oppo}/utilization": "#plot-causes .main-svg >> nth=0",
        f"/runs/{oppo}/samples": "#rows tr",
        f"/runs/{oppo}/samples/side-by-side": "#nothing h2:text-is('This run does not evaluate')",
        f"/runs/{oppo}/samples/side-by-side?held_out=false": "#prompts article >> nth=1",
        f"/runs/{oppo}/logs": "#log li",
        f"/runs/{oppo}/config": "#spec-text",
        f"/runs/{oppo}/checkpoints": "#checkpoints tr",
        f"/runs/{oppo}/events": "#events tr",
        f"/compare?runs={sequential},{oppo}": "#plot-reward .main-svg",
        "/compare": "#nothing h2",
        f"/compare/samples?runs={sequential},{oppo}&held_out=false": "#prompts article >> nth=1",
        "/compare/samples": "#choose-runs h2",
        "/teams": "h2",
        f"/teams/{team_id}/secrets": "#secret-name",
        f"/teams/{team_id}/audit": ".audit tr",
        f"/teams/{team_id}/storage": "main h2",
        f"/teams/{team_id}/alerts": "main h2",
        f"/teams/{team_id}/tokens": "#token-name",
        f"/runs/{trashed}": "h2:text-is('In trash')",
        "/sharing": "main h2",
        "/sharing/audit": "main h1",
        "/accounts/email/": "main input[type=email]",
        "/api": ".api-call",
        "/alerts?show=all": "main h1",
        "/accounts/password/change/": "form input",
        "/accounts/logout/": "form button",
    }


def deleted_run(platform):
    """A run in the trash."""
    from oppo_platform.runs.lifecycle import cancel_run
    from oppo_platform.storage.trash import delete_run

    run_id = platform.submit("letters deleted", steps=6)
    cancel_run(run_id, "user:mira")
    delete_run(run_id, "user:mira")
    return run_id


@pytest.mark.parametrize(
    ("window", "scheme"),
    [pytest.param(DESK, "light", id="desk-light"), pytest.param(PHONE, "dark", id="phone-dark", marks=pytest.mark.full)],
)
def test_pages_are_clean(visit, platform, two_runs, window, scheme):
    visitor = visit(color_scheme=scheme, reduced_motion="reduce", **window)
    page, asked = visitor.page, []
    page.on("request", lambda request: asked.append(request.url))
    pages = pages_of(platform.project.team_id, *two_runs, deleted_run(platform))
    for path, shown in pages.items():
        page.goto(path)
        page.wait_for_selector(shown, state="attached")
        visitor.fits()
        assert faults(page) == [], path
        for tab in page.locator(".tabs [aria-current=page]").all():
            expect(tab).to_be_in_viewport(ratio=0.9)
        if window is DESK:
            keys_lead_on(page)
        else:
            fits_the_narrowest(visitor)
    for path in list(pages)[-2:-9:-1] if window is PHONE else ():
        page.go_back(wait_until="commit")
        page.wait_for_selector(pages[path], state="attached")
        page.wait_for_url("**/teams/*" if path == "/teams" else f"**{path}")  # the former leads on to the only team
    assert [url for url in asked if not url.startswith((platform.web.url, "data:", "blob:"))] == []


def test_the_documentation_is_accessible(visit, platform, settings, tmp_path):
    from tests.docs.test_site import ROOT, build

    settings.DOCS_SITE = tmp_path / "unbuilt"
    page = visit(color_scheme="dark").page
    page.goto("/docs/")
    expect(page.locator("h1")).to_have_text("The documentation is not built")
    assert faults(page) == []
    settings.DOCS_SITE = tmp_path / "site"
    assert build(ROOT, settings.DOCS_SITE).returncode == 0
    for path in ("/docs/", "/docs/tutorial.html", "/docs/reference/api.html"):
        page.goto(path)
        page.wait_for_selector("h1")
        assert faults(page, without=["landmark-unique"]) == [], f"{path}; the theme gives several landmarks one name"


def test_error_pages_say_what_to_do(visit, two_runs):
    visitor = visit()
    visitor.expects("404")  # a browser logs the status of a page itself
    reply = visitor.page.goto("/runs/99999999")
    assert reply.status == 404
    assert "Page not found" in visitor.page.inner_text("h1")
    reply = visitor.page.goto("/runs?show=nonsense")
    assert reply.status == 404


def test_login_by_password_leads_where_one_wanted_to_go(visit, platform, two_runs):
    visitor = visit(logged_in=False)
    page = visitor.page
    page.goto(f"/runs/{two_runs[1]}/config")
    page.wait_for_url("**/accounts/login/**")
    page.fill("#id_login", platform.user.username)
    page.fill("#id_password", "not the password")
    page.click("text=Log in >> nth=-1")
    expect(page.locator(".error")).to_have_count(1)
    page.fill("#id_password", platform.password)
    page.press("#id_password", "Enter")
    page.wait_for_selector("#spec-text")
    page.wait_for_url(f"**/runs/{two_runs[1]}/config")


def test_keyboard_leads_everywhere(visit, two_runs):
    page = visit().page
    page.goto("/teams")
    for keys, path in {"gr": "/runs", "gq": "/queue", "gc": "/compare", "gn": "/runs/new"}.items():
        page.keyboard.type(keys)
        page.wait_for_url(f"**{path}**")
    page.goto(f"/runs/{two_runs[1]}/logs")
    page.keyboard.press("]")
    page.wait_for_url("**/config")
    page.keyboard.press("[")
    page.wait_for_url("**/logs")
    page.goto("/runs")
    page.keyboard.press("/")
    expect(page.locator("#filter")).to_be_focused()
    page.keyboard.type("name:sequential")
    page.wait_for_selector(f"#rows tr[data-key='{two_runs[1]}']", state="detached")
    expect(page.locator(f"#rows tr[data-key='{two_runs[0]}']")).to_have_count(1)
    page.keyboard.press("Escape")
    page.wait_for_selector(f"#rows tr[data-key='{two_runs[1]}']")
    page.keyboard.press("?")
    expect(page.locator("dialog.keys[open]")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator("dialog.keys[open]")).to_have_count(0)
    before = page.evaluate("document.documentElement.dataset.theme || ''")
    page.keyboard.press("t")
    page.wait_for_function("was => ![was, undefined].includes(document.documentElement.dataset.theme)", arg=before)
    after = page.evaluate("document.documentElement.dataset.theme")
    assert after in ("light", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", after)


def test_a_team_gets_a_project_and_a_member(visit, platform):
    from oppo_platform.accounts.services import create_user

    visitor = visit()
    visitor.expects("422")  # of the one whom nobody knows
    page = visitor.page
    page.goto("/teams")
    page.wait_for_url("**/teams/*")
    page.fill("input[name=name]", "Poems")
    page.click("text=Create project")
    page.wait_for_selector("text=Poems was created.")
    page.fill("#new-member", "nobody")
    page.click("text=Add member")
    page.wait_for_selector("text=There is no user named nobody.")
    expect(page.locator("#new-member")).to_have_value("nobody")
    create_user("jo", "jo@example.org")
    page.fill("#new-member", "jo")
    page.click("text=Add member")
    page.wait_for_selector("text=jo is now member in Main.")
    page.select_option("[aria-label='Role of jo']", "viewer")
    page.wait_for_selector("text=jo is now viewer in Main.")
    expect(page.locator("[aria-label='Role of jo']")).to_have_value("viewer")
    page.click("[aria-label='Remove jo']")
    page.click("text=Remove from team")
    page.wait_for_selector("text=jo is no longer in Main.")


def test_an_invited_person_makes_an_account_with_the_copied_link(visit, platform):
    owner = visit().page
    owner.goto("/teams")
    owner.fill("#invite-note", "kim@example.org")
    owner.click("text=Create invite")
    link = owner.input_value("#fresh-link")
    expect(owner.locator("#fresh-link")).to_be_focused()
    guest = visit(logged_in=False).page
    guest.goto(urlsplit(link).path)
    guest.fill("#username", "kim")
    expect(guest.locator("#email")).to_have_value("kim@example.org")
    guest.fill("#password", "a rather long password")
    guest.press("#password", "Enter")
    guest.wait_for_selector("text=Welcome to Main. Your role: member.")
    owner.goto("/teams")
    owner.click("text=Audit log")
    owner.select_option("[name=action]", "invite.accept")
    owner.wait_for_selector("td >> text=user:kim")


def test_without_worker_the_pages_say_how_to_get_one(visit, platform):
    from oppo_platform.cluster.models import Node

    page = visit().page
    before = Node.objects.get()
    Node.objects.update(last_seen_at=None)
    try:
        page.goto("/runs/new")
        page.wait_for_selector("text=No worker is connected")
        page.wait_for_selector("#problems li")
        expect(page.locator("#send")).to_have_attribute("aria-disabled", "true")
        page.click("text=How to connect a worker")
        expect(page.locator("#join ol"), "the steps are open").to_be_visible()
        expect(page.locator("#join ol")).to_be_in_viewport()
        page.wait_for_selector(".node >> text=unreachable")
    finally:
        Node.objects.update(last_seen_at=before.last_seen_at)
        platform.fleet.beat()


@pytest.mark.parametrize("width", [1440, 1024, 720, 390])
def test_the_tools_of_a_chart_page_are_seen_at_every_width(visit, two_runs, width):
    visitor = visit(viewport={"width": width, "height": 900})
    page = visitor.page
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#plot-reward .main-svg >> nth=0")
    strip = page.locator(".tabs").bounding_box()
    tab = page.locator(".tabs [aria-current=page]").bounding_box()
    assert strip["x"] <= tab["x"]
    assert tab["x"] + tab["width"] <= strip["x"] + strip["width"] + 1, "the open tab can be read"
    for tool in (".tools [data-axis=gpu_seconds]", "#outliers", "#smoothing"):
        box = page.locator(tool).bounding_box()
        assert box, tool
        assert box["x"] >= 0, tool
        assert box["x"] + box["width"] <= width, tool
    visitor.fits()


def test_pages_that_do_not_exist_keep_the_navigation(visit, platform):
    visitor = visit()
    visitor.expects("404")
    page = visitor.page
    page.goto("/runs/999999")
    expect(page.locator("h1")).to_have_text("Page not found")
    page.click(".rail >> text=Queue")
    page.wait_for_url("**/queue")
    out = visit(logged_in=False)
    out.expects("404")
    out.page.goto("/nothing")
    assert out.page.locator(".rail").count() == 0


def test_a_page_that_is_not_allowed_keeps_the_navigation(visit, platform):
    from oppo_platform.accounts.models import Membership

    visitor = visit()
    visitor.expects("403")
    page = visitor.page
    Membership.objects.filter(user=platform.user).update(role="viewer")
    try:
        reply = page.goto(f"/teams/{platform.project.team_id}/audit")
    finally:
        Membership.objects.filter(user=platform.user).update(role="owner")
    assert reply.status == 403
    expect(page.locator("h1")).to_have_text("Your role does not allow this")
    assert faults(page) == []
    page.click(".rail >> text=Queue")
    page.wait_for_url("**/queue")


def test_the_page_of_mail_addresses_is_one_of_the_platform(visit, platform):
    page = visit().page
    page.goto("/accounts/email/")
    expect(page.locator(".rail")).to_be_visible()
    expect(page.locator("main .card h1")).to_have_count(1)
    for button in page.locator("main button").all():
        expect(button).to_have_css("cursor", "pointer")
    expect(page.locator("main input[type=email]")).to_have_css("height", "34px")


def test_lists_in_the_audit_log_are_written_as_text(visit, platform):
    from oppo_platform import clock
    from oppo_platform.accounts.models import AuditEntry

    team = platform.project.team
    details = {"scopes": ["read", "submit"]}
    AuditEntry.objects.create(
        actor="user:mira", at=clock.now(), team=team, action="token.create", target="notebook", details=details
    )
    page = visit().page
    page.goto(f"/teams/{team.pk}/audit")
    expect(page.locator("main")).to_contain_text("scopes read, submit")
    expect(page.locator("main")).not_to_contain_text("['read'")


def test_a_viewer_is_not_offered_to_submit(visit, platform):
    from oppo_platform.accounts.models import Membership

    page = visit().page
    page.goto("/queue")
    expect(page.locator(".rail >> text=Submit")).to_be_visible()
    Membership.objects.filter(user=platform.user).update(role="viewer")
    try:
        page.reload()
        expect(page.locator(".rail >> text=Queue")).to_be_visible()
        assert page.locator(".rail >> text=Submit").count() == 0
    finally:
        Membership.objects.filter(user=platform.user).update(role="owner")


def test_single_keys_can_be_switched_off(visit, platform):
    page = visit().page
    page.goto("/queue")
    theme = "() => document.documentElement.dataset.theme"
    page.keyboard.press("t")
    first = page.evaluate(theme)
    assert first in ("dark", "light")
    page.keyboard.press("?")
    expect(page.locator("dialog.keys")).to_contain_text("light or dark")
    page.uncheck("dialog.keys input")
    page.keyboard.press("Escape")
    expect(page.locator("dialog.keys"), "the browser closes it a moment later").to_have_count(0)
    page.keyboard.press("t")
    assert page.evaluate(theme) == first
    page.keyboard.press("?")
    page.check("dialog.keys input")
    page.keyboard.press("Escape")
    expect(page.locator("dialog.keys"), "the browser closes it a moment later").to_have_count(0)
    page.keyboard.press("t")
    assert page.evaluate(theme) != first


def test_scripts_and_templates_write_a_figure_alike(visit):
    page = visit().page
    page.goto("/runs")
    numbers = [
        sign * lead * 10.0**power
        for power in range(-9, 10)
        for lead in (0.9999, 0.99949, 1.0, 1.234, 5.55, 9.96)
        for sign in (1, -1)
    ]
    written = page.evaluate(
        """async (numbers) => {
          const { figure } = await import("/static/js/core/format.js");
          return numbers.map(figure);
        }""",
        [*numbers, 0],
    )
    assert dict(zip(numbers, written, strict=False)) == {number: figure(number) for number in numbers}
    assert written[-1] == figure(0)

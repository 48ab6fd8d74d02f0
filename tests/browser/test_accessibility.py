"""What axe finds on the pages outside a session, on error pages, in dialogs and menus, and on pages filled with data."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tests.browser.test_pages import deleted_run, faults
from tests.browser.test_pinned_charts import PINNED, opened

pytestmark = pytest.mark.browser

DESK, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 860}
WINDOWS = pytest.mark.parametrize(
    ("viewport", "color_scheme"),
    [pytest.param(DESK, "light", id="desk-light"), pytest.param(PHONE, "dark", id="phone-dark", marks=pytest.mark.full)],
)
PASSWORD = "a rather long password"


@pytest.fixture
def check():
    """Collects what axe finds on each page, so that one run shows every fault."""
    found = {}

    def one(visitor, name):
        visitor.fits()
        if bad := faults(visitor.page):
            found[name] = bad

    yield one
    assert found == {}


@pytest.fixture
def window(viewport, color_scheme):
    """The browser context of a parametrised window."""
    return {"viewport": viewport, "color_scheme": color_scheme, "reduced_motion": "reduce"}


@pytest.fixture(scope="module")
def owner(platform):
    """Owner of two teams: "Filled" has a second member, a webhook, tokens and a secret."""
    from oppo_platform.accounts.api_tokens import create_own_token, create_service_token
    from oppo_platform.accounts.services import create_team, create_user
    from oppo_platform.accounts.team_secrets import set_secret
    from oppo_platform.alerts.webhooks import add_webhook

    user = create_user("olga", "olga@example.org").user
    create_team("Empty", user)
    team = create_team("Filled", user)
    create_user("milo", "milo@example.org", team)
    add_webhook(user, team, "https://hooks.slack.com/services/T0/B0/y", ["failed"])
    create_own_token(user, team, "laptop", 30, "read")
    create_service_token(user, team, "nightly", None, "read")
    set_secret(user, team, "HF_TOKEN", "hf_0123456789")
    return user, team.pk


def log_in(page, user):
    from oppo_platform.accounts.services import create_login_link

    page.goto(urlsplit(create_login_link(user)).path)


@WINDOWS
def test_account_pages_are_clean(visit, platform, owner, window, check):
    from allauth.account.models import EmailAddress, EmailConfirmationHMAC

    visitor = visit(logged_in=False, **window)
    page = visitor.page
    page.goto("/accounts/login/")
    check(visitor, "login")
    page.fill("#id_login", owner[0].username)
    page.fill("#id_password", "not the password")
    page.press("#id_password", "Enter")
    expect(page.locator(".error")).to_have_count(1)
    check(visitor, "login with an error")
    page.goto("/accounts/password/reset/")
    check(visitor, "password reset without a mail server")
    address = EmailAddress.objects.filter(user=owner[0]).first() or EmailAddress(user=owner[0], email=owner[0].email)
    address.verified = False
    address.save()
    for path in ("signup/", "inactive/", "confirm-email/", f"confirm-email/{EmailConfirmationHMAC(address).key}/"):
        page.goto(f"/accounts/{path}")
        check(visitor, path)
    page.goto("/accounts/confirm-email/expired/")
    check(visitor, "an expired confirmation")
    log_in(page, owner[0])
    page.goto("/accounts/reauthenticate/")
    expect(page.locator("input[type=password]")).to_be_visible()
    check(visitor, "reauthenticate")
    page.goto("/accounts/password/change/")
    page.fill("#id_oldpassword", "wrong")
    page.fill("#id_password1", PASSWORD)
    page.fill("#id_password2", PASSWORD)
    page.press("#id_password2", "Enter")
    page.wait_for_selector("text=Please type your current password")
    check(visitor, "password change with an error")


@WINDOWS
def test_pages_of_a_mailed_password_reset_are_clean(visit, platform, owner, window, check, settings):
    from django.core import mail

    settings.OPPO_SMTP_URL = "smtp://localhost"
    visitor = visit(logged_in=False, **window)
    page = visitor.page
    page.goto("/accounts/password/reset/")
    check(visitor, "password reset")
    page.fill("#id_email", owner[0].email)
    page.press("#id_email", "Enter")
    page.wait_for_url("**/password/reset/done/")
    check(visitor, "password reset done")
    key = re.search(r"/accounts/password/reset/key/\S+", mail.outbox[-1].body).group()
    page.goto("/accounts/password/reset/key/1-expired/")
    check(visitor, "an expired reset key")
    page.goto(key)
    check(visitor, "a reset key")
    for again in ("another long password", PASSWORD):
        page.fill("#id_password1", PASSWORD)
        page.fill("#id_password2", again)
        page.press("#id_password2", "Enter")
        if again != PASSWORD:
            page.wait_for_selector("text=You must type the same password")
            check(visitor, "a reset key with an error")
    page.wait_for_url("**/password/reset/key/done/")
    check(visitor, "password reset with a key done")


@WINDOWS
def test_one_time_links_are_clean(visit, platform, owner, window, check):
    from oppo_platform.accounts.invites import create_invite
    from oppo_platform.accounts.passwords import create_password_link

    visitor = visit(logged_in=False, **window)
    visitor.expects("404", "422")  # a browser logs the status of a page itself
    page = visitor.page
    invite = urlsplit(create_invite(platform.user, platform.project.team, "member", "lee@example.org")).path
    password = urlsplit(create_password_link(None, owner[0])).path
    for path in (invite, password, "/invites/void", "/password-links/void"):
        page.goto(path)
        check(visitor, path)
    page.goto(invite)
    page.fill("#username", owner[0].username)
    page.fill("#password", PASSWORD)
    page.press("#password", "Enter")
    expect(page.locator(".error")).to_have_count(1)
    check(visitor, "invite with an error")
    page.goto(password)
    page.fill("#password", PASSWORD)
    page.fill("#again", "another long password")
    page.press("#again", "Enter")
    expect(page.locator(".error")).to_have_count(1)
    check(visitor, "password link with an error")
    log_in(page, owner[0])
    for path in (invite, "/invites/void"):
        page.goto(path)
        check(visitor, f"{path} logged in")


# Statuses that no address provokes: a malformed request, a refusal without a session, an error in a view, a database outage.
NO_ADDRESS = ("400", "403", "500", "503")


def serve(page, code):
    """Reply to the address /CODE with the error page of this status."""
    from django.template.loader import render_to_string

    body = render_to_string(f"{code}.html")
    page.route(f"**/{code}", lambda route: route.fulfill(status=int(code), content_type="text/html", body=body))


@WINDOWS
def test_error_pages_are_clean(visit, platform, window, check):
    for logged_in in (False, True):
        visitor = visit(logged_in=logged_in, **window)
        visitor.expects("404", *NO_ADDRESS)  # a browser logs the status of a page itself
        page = visitor.page
        for code in ("404",) if logged_in else ("404", *NO_ADDRESS):
            if code in NO_ADDRESS:
                serve(page, code)
            page.goto(f"/{code}")
            expect(page.locator(".card .note")).to_have_text(code)
            check(visitor, f"{code}, logged in: {logged_in}")
        page.goto("/accounts/logout/" if logged_in else "/accounts/login/")
        visitor.context.clear_cookies(name="oppo_csrf")
        page.evaluate("document.querySelector('main form').submit()")
        expect(page.locator("h1")).to_have_text("This form has expired")
        check(visitor, f"403 of a form, logged in: {logged_in}")


@WINDOWS
def test_open_dialogs_and_menus_are_clean(visit, platform, two_runs, window, check):
    visitor = visit(**window)
    page = visitor.page
    page.goto(f"/runs/{two_runs[1]}")
    page.wait_for_selector("#metric-groups .metric >> nth=3", state="attached")
    page.click(".account summary")
    check(visitor, "account menu")
    page.keyboard.press("Escape")
    for keys, dialog in {"Control+k": "palette", "?": "keys"}.items():
        page.keyboard.press(keys)
        page.wait_for_selector(f"dialog.{dialog}[open]")
        if dialog == "palette":
            page.keyboard.type("queue")
            page.wait_for_selector("dialog.palette [role=option]")
        check(visitor, dialog)
        page.keyboard.press("Escape")
        expect(page.locator(f"dialog.{dialog}")).to_have_count(0)
    for button, dialog in {"[data-dialog=labels-dialog]": "labels-dialog", "#delete": "delete-dialog"}.items():
        page.click(button)
        page.wait_for_selector(f"#{dialog}[open]")
        check(visitor, dialog)
        page.click(f"#{dialog} [data-close]")
    run_id = platform.submit("letters running", steps=20)
    platform.start(run_id)
    page.goto(f"/runs/{run_id}")
    for wish in ("priority", "pause", "cancel"):
        page.click(f"[data-wish={wish}]")
        page.wait_for_selector("#wish-dialog[open]")
        check(visitor, f"dialog of an action: {wish}")
        page.click("#wish-keep")


@WINDOWS
def test_the_chart_editor_and_a_charts_menu_are_clean(visit, two_runs, window, check):
    visitor = visit(**window)
    page = visitor.page
    page.goto(f"/runs/{two_runs[1]}")
    page.wait_for_selector("#metric-groups .metric >> nth=3", state="attached")
    page.click("#pinned-new")
    for key in ("vf_lo", "no such"):
        page.fill("#chart-key", key)
        page.keyboard.press("Enter")
    expect(page.locator("#chart-status")).to_contain_text("no metric")
    page.fill("#chart-key", "vf")
    page.wait_for_selector("#chart-words li")
    check(visitor, "chart editor")
    page.keyboard.press("Escape")
    page.click("#chart-editor [data-close]")
    menu = opened(page, "actor/entropy")
    check(visitor, "menu of a chart")
    menu.get_by_text("Full screen", exact=True).click()
    page.wait_for_selector("dialog.full .main-svg >> nth=0")
    check(visitor, "chart in full screen")


def dialogs_are_clean(visitor, path, check):
    """Check a page, and each dialog that one of its buttons opens."""
    page = visitor.page
    page.goto(path)
    check(visitor, path)
    buttons = page.locator("main [data-dialog]").all()
    assert buttons, path
    for button in buttons:
        button.click()
        page.wait_for_selector("dialog[open]")
        check(visitor, f"{path}: {button.get_attribute('data-dialog')}")
        page.click("dialog[open] [data-close]")


@WINDOWS
def test_dialogs_of_lists_and_teams_are_clean(visit, platform, owner, two_runs, window, check):
    visitor = visit(**window)
    page, (user, team) = visitor.page, owner
    page.set_viewport_size(DESK)  # a phone has no boxes to select runs with
    page.goto("/runs?q=letters")
    page.check(f"#rows input[value='{two_runs[0]}']")
    for bulk in ("tag", "delete"):
        page.click(f"[data-bulk={bulk}]")
        page.wait_for_selector("#bulk-dialog[open]")
        check(visitor, f"bulk dialog: {bulk}")
        page.click("#bulk-dialog [data-close]")
    deleted_run(platform)
    dialogs_are_clean(visitor, f"/teams/{platform.project.team_id}/storage", check)
    page.set_viewport_size(window["viewport"])
    visitor.context.clear_cookies()
    log_in(page, user)
    page.goto("/teams")
    expect(page.locator("tbody tr")).to_have_count(2)
    check(visitor, "list of teams")
    for tab in ("", "/alerts", "/tokens", "/secrets"):
        dialogs_are_clean(visitor, f"/teams/{team}{tab}", check)
    for tab, filled in {"": {"#invite-note": "a note"}, "/tokens": {"#token-name": window["color_scheme"]}}.items():
        page.goto(f"/teams/{team}{tab}")
        for field, text in filled.items():
            page.fill(field, text)
            page.press(field, "Enter")
        page.wait_for_selector("#fresh-link")
        check(visitor, f"/teams/{team}{tab} with a new link")


def planned_run(page, platform):
    """The id of a run that has ended, submitted by the form, which gives it a plan."""
    page.goto("/runs/new")
    page.wait_for_selector("#plan-estimates:not([hidden])")
    page.fill("[data-path=steps]", "12")
    page.wait_for_selector("#send[aria-disabled=false]")
    page.click("#send")
    page.wait_for_url(re.compile(r"/runs/\d+$"))
    run_id = int(page.url.rsplit("/", 1)[1])
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(12)))
    supervisor.tell(story.end())
    supervisor.end("succeeded", "All steps are done.")
    return run_id


@WINDOWS
def test_filled_pages_of_runs_are_clean(visit, platform, two_runs, window, check):
    from oppo_platform import clock
    from oppo_platform.projects.models import ChartLayout
    from oppo_platform.storage.models import RunStorage

    visitor = visit(**window)
    page = visitor.page
    run_id = planned_run(page, platform)
    page.reload()
    page.evaluate(PINNED)
    page.reload()
    for drawn_in_view in ("#pinned-charts", "#metric-groups"):
        page.locator(f"{drawn_in_view} .metric").first.scroll_into_view_if_needed()
        page.wait_for_selector(f"{drawn_in_view} .main-svg >> nth=0")
    page.wait_for_selector(".plan-review")
    check(visitor, "run with a plan, pinned charts and all metrics")
    ChartLayout.objects.all().delete()
    RunStorage.objects.update_or_create(run_id=run_id, defaults={"measured_at": clock.now(), "detail_deleted_at": clock.now()})
    page.goto(f"/runs/{run_id}/timeline")
    expect(page.locator("h2 >> text=Deleted by retention")).to_be_visible()
    check(visitor, "detail deleted by retention")
    page.goto("/runs/new")
    page.wait_for_selector("#send[aria-disabled=false]")
    page.fill("[data-path='overlap.overcommit.max']", "999")
    page.locator("[data-field='overlap.overcommit.max'] .error").wait_for()
    check(visitor, "form with an error")
    page.click("[data-view=yaml]")
    page.wait_for_selector("#yaml")
    check(visitor, "YAML")
    page.fill("#yaml", "name: [1\n")
    page.wait_for_selector("#problems >> text=not valid YAML at line")
    check(visitor, "YAML with an error")

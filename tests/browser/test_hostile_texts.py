"""Markup in every text that people, programs or models fill in stays text on every page, in whatever a script draws too.

The values are written into the database past every check, so that a page may rely on none.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth import get_user_model

from oppo_platform.accounts.api_tokens import create_service_token
from oppo_platform.accounts.invites import create_invite
from oppo_platform.accounts.models import ApiToken, AuditEntry, Invite, Team, TeamSecret
from oppo_platform.accounts.passwords import create_password_link
from oppo_platform.accounts.team_secrets import set_secret
from oppo_platform.alerts.lifecycle import open_alert
from oppo_platform.alerts.models import Alert, Webhook
from oppo_platform.alerts.policy import Condition
from oppo_platform.alerts.webhooks import add_webhook
from oppo_platform.cluster.models import CatalogueItem, Device, Node, Pool
from oppo_platform.projects.models import Project
from oppo_platform.runs.models import Attempt, Change, Checkpoint, Run, SavedView, Transition
from oppo_platform.runs.saved_views import save_view
from oppo_platform.runs.tags import change_tags
from oppo_platform.scheduling.cycle import run_cycle
from oppo_platform.scheduling.models import WaitingReason
from oppo_platform.storage.trash import delete_run
from oppo_platform.telemetry.models import Decision, LogLine, SampleRow, Series

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

# It leaves an attribute, a tag, a script, and a template literal; the first element that comes of it has the attribute.
MARKUP = """'"`--></script></title></textarea><img data-hostile src=x onerror="window.hostile=1">${window.hostile=1}{{7*7}}"""
SHORT = '"><b data-hostile>'  # for fields with little room
ADDRESS = "javascript:window.hostile=1//"
TEXTS: dict[Any, tuple[str, ...]] = {
    get_user_model(): ("username", "first_name"),
    Team: ("name",),
    ApiToken: ("name",),
    Invite: ("note",),
    TeamSecret: ("name",),
    AuditEntry: ("target", "details"),
    Project: ("name",),
    Run: ("name", "reason", "error", "tags", "last_log_lines", "latest"),
    Attempt: ("reason", "device_names", "provenance"),
    Transition: ("reason", "actor"),
    Change: ("reason", "actor"),
    SavedView: ("name", "query"),
    Pool: ("name",),
    Node: ("name", "hostname", "drain_reason"),
    Device: ("model", "health"),
    CatalogueItem: ("entry_id", "architecture", "problem"),
    WaitingReason: ("text", "sooner"),
    Series: ("key",),
    Decision: ("reason",),
    SampleRow: ("data",),
    LogLine: ("text",),
    Alert: ("why", "closed_why"),
}
ADDRESSES: dict[Any, tuple[str, ...]] = {Webhook: ("url",), Checkpoint: ("url",)}
OF_A_RUN = ("", "/timeline", "/utilization", "/samples", "/logs", "/config", "/checkpoints", "/events")
OF_A_TEAM = ("", "/storage", "/alerts", "/tokens", "/secrets", "/audit")
PAGES = (
    *(f"/runs/{{run}}{tab}" for tab in OF_A_RUN), "/runs/{failed}", "/runs/{deleted}", "/runs/{waiting}", "/runs/new?from={run}",
    *(f"/teams/{{team}}{tab}" for tab in OF_A_TEAM), "/runs", "/queue", "/sharing", "/alerts", "/compare?runs={run},{failed}",
    "{invite}", "{reset}",
)  # fmt: skip
WITHOUT_TEXT = ("/runs/{run}/utilization", "/runs/{run}/timeline")  # their texts are in plots, whose labels are drawn
FOUND = """() => {
  const links = [...document.querySelectorAll('a, form, img, iframe, script')];
  const runs = a => /^(href|src|action|xlink:href)$/.test(a.name) && /^\\s*javascript:/i.test(a.value);
  const bad = e => [...e.attributes].some(runs);
  return [
    ...[...document.querySelectorAll('[data-hostile]')].map(e => `an element in ${e.parentElement.outerHTML.slice(0, 300)}`),
    ...links.filter(bad).map(e => `an address in ${e.outerHTML.slice(0, 300)}`),
    ...(window.hostile === undefined ? [] : ['a script ran']),
  ];
}"""
OPEN_ALL = "document.querySelectorAll('details').forEach(e => { e.open = true; })"


def hostile(value: Any, room: int | None) -> Any:
    """The value with markup at its end, in each text of a list or of an object."""
    if isinstance(value, dict):
        return {key: hostile(inner, None) for key, inner in value.items()}
    if isinstance(value, list):
        return [hostile(inner, None) for inner in value]
    if not isinstance(value, str):
        return value
    markup = MARKUP if room is None or len(value) + len(MARKUP) <= room else SHORT
    return value[: (room or 10**9) - len(markup)] + markup


def rewrite() -> list[tuple[Any, Any, dict[str, Any]]]:
    """Write markup into all of `TEXTS` and addresses into all of `ADDRESSES`; returns what was there, by row."""
    before = []
    for model, names in {**TEXTS, **ADDRESSES}.items():
        limits = {name: getattr(model._meta.get_field(name), "max_length", None) for name in names}
        rows = list(model.objects.values("pk", *names))
        assert rows, f"no {model.__name__} to write into"
        for row in rows:
            key = row.pop("pk")
            before.append((model, key, row))
            changed = {n: ADDRESS if model in ADDRESSES else hostile(value, limits[n]) for n, value in row.items()}
            model.objects.filter(pk=key).update(**changed)
    return before


@pytest.fixture
def scene(platform, two_runs):
    """Something of everything that has a text."""
    team, mira = platform.project.team, platform.user
    run = Run.objects.get(pk=two_runs[1])
    change_tags(run.pk, ["baseline"], [], "user:mira")
    failed = platform.submit("letters failed", steps=5)
    supervisor, _ = platform.start(failed)
    supervisor.end("failed", "The reward is not finite.", ["Traceback", "ValueError"])
    open_alert(run, Condition.KL_ABOVE, "KL to the reference: 63 nats.", 63.0, 50.0)
    deleted = platform.trained("letters deleted", steps=2)
    delete_run(deleted, "user:mira")
    holder, waiting = platform.submit("letters first", steps=5), platform.submit("letters waiting", steps=5)
    platform.start(holder)
    run_cycle()
    kept = {"url": "file:///x", "manifest_sha256": "0" * 64, "bytes": 1, "registered_at": run.created_at}
    Checkpoint.objects.create(run=run, attempt=run.attempts.get(), step=50, **kept)
    view = save_view(mira, "mine", {"q": "letters"}, team)["id"]
    add_webhook(mira, team, "https://example.org/old", ["failed"])
    set_secret(mira, team, "HF_TOKEN", "a secret")
    create_service_token(mira, team, "old", None, "submit")
    invite = create_invite(mira, team, "member", "zoe")
    reset = create_password_link(None, mira)
    paths = {"invite": invite, "reset": reset}
    found = {"run": run.pk, "failed": failed, "deleted": deleted, "waiting": waiting, "team": team.pk, "view": view}
    yield found | {name: "/" + link.split("/", 3)[3] for name, link in paths.items()}
    Checkpoint.objects.filter(run=run).delete()


def test_markup_in_every_field_stays_text(visit, scene):
    visitor = visit()
    visitor.expects("status of 404")
    page = visitor.page
    before = rewrite()
    try:
        found, shown = {}, {}
        for path in PAGES:
            page.goto(path.format(**scene))
            page.wait_for_load_state("networkidle") if "/new" in path else page.wait_for_timeout(500)
            page.evaluate(OPEN_ALL)
            for plot in page.locator(".js-plotly-plot").all():
                plot.hover(force=True)
            found[path] = page.evaluate(FOUND)
            shown[path] = "data-hostile" in page.locator("body").inner_text()
    finally:
        for model, key, row in before:
            model.objects.filter(pk=key).update(**row)
    assert not {path: what for path, what in found.items() if what}
    assert [path for path in PAGES if not shown[path]] == list(WITHOUT_TEXT)

"""Markup in every text that people, programs or models fill in stays text on every page, in whatever a script draws too.

The values are written into the database past every check, so that a page may rely on none.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection, transaction

from oppo_contract import wire
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
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.labels import change_tags
from oppo_platform.runs.models import Attempt, Change, Checkpoint, Run, SavedView, Transition
from oppo_platform.runs.saved_views import save_view
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
    Run: ("name", "reason", "error", "tags", "last_log_lines"),
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
PLOT = "#plot-reward.js-plotly-plot"
# Page → what its scripts draw last, if they draw.
PAGES = {
    "/runs/{run}": PLOT,
    "/runs/{run}/timeline": "#range:has-text('step')",
    "/runs/{run}/utilization": "#plot-overlap.js-plotly-plot",
    "/runs/{run}/samples": "#rows tr[data-id]",
    "/runs/{run}/logs": "#log:has-text('data-hostile')",
    "/runs/{run}/config": "main",
    "/runs/{run}/events": "#events tr",
    "/runs/{holder}/checkpoints": "#checkpoints tr",
    "/runs/new?from={run}": "main",
    "/compare?runs={run},{failed}": PLOT,
    "/runs": "#rows tr",
    **dict.fromkeys(("/runs/{failed}", "/runs/{deleted}", "/runs/{waiting}", "/queue", "/sharing", "/alerts"), "main"),
    **{f"/teams/{{team}}{tab}": "main" for tab in ("", "/storage", "/alerts", "/tokens", "/secrets", "/audit")},
    "{invite}": "main",
    "{reset}": "main",
}
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


Rows = list[tuple[Any, Any, dict[str, Any]]]


@transaction.atomic
def write(rows: Rows) -> None:
    """Set the fields of rows: (model, key, fields), also where triggers refuse it."""
    connection.cursor().execute("SET LOCAL session_replication_role = replica")
    for model, key, fields in rows:
        model.objects.filter(pk=key).update(**fields)


def rewrite() -> Rows:
    """Write markup into all of `TEXTS` and addresses into all of `ADDRESSES`; returns what was there."""
    before, after = [], []
    for model, names in {**TEXTS, **ADDRESSES}.items():
        room = {name: getattr(model._meta.get_field(name), "max_length", None) for name in names}
        rows = list(model.objects.values("pk", *names))
        assert rows, f"no {model.__name__} to write into"
        for row in rows:
            key = row.pop("pk")
            before.append((model, key, row))
            after.append(
                (model, key, {n: ADDRESS if model in ADDRESSES else hostile(value, room[n]) for n, value in row.items()})
            )
    write(after)
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
    supervisor, _ = platform.start(holder)
    run_cycle()
    url = f"{artifact_url(holder)}/checkpoints/step-00000001"
    kept = wire.CheckpointRegistration(epoch=1, step=1, url=url, manifest_sha256="0" * 64, bytes=1)
    platform.fleet._post(f"{supervisor.path}/checkpoints", supervisor.claimed.attempt_token, kept)
    save_view(mira, "mine", {"q": "letters"}, team)
    add_webhook(mira, team, "https://example.org/old", ["failed"])
    set_secret(mira, team, "HF_TOKEN", "a secret")
    create_service_token(mira, team, "old", None, "submit")
    invite = create_invite(mira, team, "member", "zoe")
    reset = create_password_link(None, mira)
    links = {name: "/" + link.split("/", 3)[3] for name, link in (("invite", invite), ("reset", reset))}
    runs = {"run": run.pk, "failed": failed, "deleted": deleted, "holder": holder, "waiting": waiting}
    return runs | links | {"team": team.pk}


def test_markup_in_every_field_stays_text(visit, scene):
    visitor = visit()
    visitor.expects("status of 404")
    page = visitor.page
    before = rewrite()
    try:
        found, silent = {}, []
        for path, drawn in PAGES.items():
            page.goto(path.format(**scene))
            page.wait_for_selector(drawn)
            page.evaluate(OPEN_ALL)
            for plot in page.locator(".js-plotly-plot").all():
                plot.hover(force=True)
            found |= {path: what} if (what := page.evaluate(FOUND)) else {}
            silent += [] if "data-hostile" in page.locator("body").inner_text() else [path]
    finally:
        write(before)
    assert found == {}
    assert silent == [], "its texts are not shown, so nothing was tested"

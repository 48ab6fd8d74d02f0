"""What a team's owner asks of a real platform by notebook: quotas, alerts, webhooks, the audit log."""

import pytest

from oppo_client import Client, Forbidden
from oppo_platform.alerts.lifecycle import open_alert
from oppo_platform.alerts.policy import Condition
from oppo_platform.runs.models import Run
from tests.client.conftest import QUICK

HOOK = "https://example.org/hook"


@pytest.fixture
def owner(live, token_of):
    with Client(live.web.url, token_of("admin"), retries=QUICK) as c:
        yield c


@pytest.fixture
def team(owner):
    (found,) = owner.teams()
    return found["id"]


def test_webhooks_are_made_changed_and_deleted(owner, team):
    made = owner.add_webhook(team, HOOK, ["failed"])
    assert made["secret"].startswith("whsec_")
    (found,) = owner.webhooks(team)
    assert (found["host"], found["on"]) == ("example.org", True)
    assert owner.change_webhook(team, made["id"], on=False, conditions=["finished"])["conditions"] == ["finished"]
    owner.delete_webhook(team, made["id"])
    assert owner.webhooks(team) == []
    assert owner.restore_webhook(team, made["id"])["conditions"] == ["finished"]
    owner.delete_webhook(team, made["id"])


def test_the_audit_log_tells_what_was_done(owner, team):
    made = owner.add_webhook(team, HOOK, ["failed"])
    owner.delete_webhook(team, made["id"])
    told = [entry["action"] for entry in owner.audit(team)]
    assert told[:2] == ["webhook.delete", "webhook.create"]
    assert {entry["action"] for entry in owner.audit(team, action="webhook.create")} == {"webhook.create"}


def test_members_by_a_lesser_token_are_told_what_it_takes(client, team):
    with pytest.raises(Forbidden):
        list(client.audit(team))


def test_quotas_and_alerts(owner, live, spec):
    assert [told["in_use"] for told in owner.quotas()] == [0]
    run = owner.submit(spec("alerting"))
    assert list(owner.alerts(run=run, open=True)) == []
    alert = open_alert(Run.objects.select_related("project").get(pk=run.id), Condition.KL_ABOVE, "KL: 63 nats.", 63.0, 50.0).pk
    (found,) = owner.alerts(run=run)
    assert (found["id"], found["acknowledged_by"]) == (alert, None)
    assert owner.acknowledge(alert)["acknowledged_by"] is not None

"""The bell and the list behind it: alerts that need attention, since the user joined the team."""

from __future__ import annotations

from oppo_platform.accounts.models import Membership
from oppo_platform.alerts.models import Alert
from tests.web.alerts.test_alerts import C, conditions, end
from tests.web.event_factories import run_round


def test_the_bell_counts_what_needs_attention_since_one_joined(training):
    world, _, tell = training
    end(tell, "failed", "RewardError: x")
    run_round()
    ada = world.login("ada")
    unread = "/api/v1/alerts/unread"
    assert ada.get(unread).json() == {"unread": 1}
    attention = ada.get("/alerts?part=rows").content.decode()
    assert "RewardError: x" in attention
    assert "new</span>" in attention
    world.clock.advance(60)
    Membership.objects.filter(user=world.people["ben"]).update(joined_at=world.clock.now())
    assert world.login("ben").get(unread).json() == {"unread": 0}, "it opened before ben joined"
    assert "RewardError: x" in world.login("ben").get("/alerts?part=rows").content.decode()
    alert = Alert.objects.get()
    assert "data-acknowledge" in attention
    assert ada.post(f"/api/v1/alerts/{alert.pk}/acknowledge").status_code == 200
    assert "RewardError: x" not in ada.get("/alerts?part=rows").content.decode()
    assert "RewardError: x" in ada.get("/alerts?part=rows&show=all").content.decode()


def test_a_finished_run_and_a_closed_alert_need_no_attention(training):
    world, _, tell = training
    tell(*range(1, 21), objective__kl=60.0)
    tell(*range(21, 60), objective__kl=1.0)
    end(tell, "succeeded", "All steps are done.")
    run_round()
    assert conditions() == [C.KL_ABOVE, C.FINISHED]
    ada = world.login("ada")
    assert ada.get("/api/v1/alerts/unread").json() == {"unread": 0}
    assert "Nothing needs attention" in ada.get("/alerts").content.decode()
    assert ada.get("/alerts?part=rows&show=all").content.decode().count("<tr id=") == 2


def test_a_failure_needs_attention_for_a_week(training):
    world, _, tell = training
    end(tell, "failed", "RewardError: x")
    run_round()
    world.clock.advance(8 * 86400)
    assert world.login("ada").get("/api/v1/alerts/unread").json() == {"unread": 0}

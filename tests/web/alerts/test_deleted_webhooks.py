"""Deleted webhooks get nothing, and can be restored until the team deletes another one."""

from __future__ import annotations

import re

import pytest

from oppo_platform.accounts.models import AuditEntry
from oppo_platform.accounts.services import AccountError
from oppo_platform.alerts import webhooks
from oppo_platform.alerts.delivery import deliver_due
from oppo_platform.alerts.lifecycle import open_alert, with_related
from oppo_platform.alerts.models import Delivery, Webhook
from oppo_platform.alerts.policy import Condition
from oppo_platform.runs.models import Run

ALL = [condition.value for condition in Condition]


@pytest.fixture(autouse=True)
def keys(settings, tmp_path):
    """A folder for the keys of each test."""
    settings.OPPO_HOME, settings.OPPO_SECRETS_KEYS = tmp_path, []


def add(world, url="https://example.org/hook"):
    webhooks.add_webhook(world.people["ada"], world.team, url, ALL)
    return Webhook.objects.latest("pk")


def undo_path(page):
    return re.search(r'action="([^"]+/restore)"', page)[1]


def test_the_button_undo_restores_a_deleted_webhook_with_its_secret(world, receiver):
    hook, ada = add(world, receiver.url), world.login("ada")
    run = with_related(Run.objects).get(pk=world.submit().pk)
    secret = webhooks.decrypt_secret(hook)
    open_alert(run, Condition.KL_ABOVE, "KL to the reference: 63 nats.", 63.0, 50.0)
    page = ada.post(f"/teams/{world.team.pk}/alerts/webhooks/{hook.pk}/delete", follow=True).content.decode()
    assert f'id="hook-{hook.pk}"' not in page
    open_alert(run, Condition.BUBBLE_ABOVE, "60 % idle.", 0.6, 0.5)
    deliver_due()
    assert (receiver.came, [d.error for d in Delivery.objects.all()]) == ([], ["The webhook was deleted."])
    page = ada.post(undo_path(page), follow=True).content.decode()
    assert (f'id="hook-{hook.pk}"' in page, 'class="push"' in page) == (True, False)  # there is nothing more to undo
    webhooks.send_test(world.people["ada"], world.team, hook.pk)
    deliver_due()
    hook.refresh_from_db()
    assert (len(receiver.came), webhooks.decrypt_secret(hook)) == (1, secret)
    actions = AuditEntry.objects.filter(action__startswith="webhook").order_by("id").values_list("action", flat=True)
    assert list(actions) == ["webhook.create", "webhook.delete", "webhook.restore"]


def test_a_message_in_time_is_sent_when_the_webhook_is_restored_first(world, receiver):
    hook, ada = add(world, receiver.url), world.people["ada"]
    run = with_related(Run.objects).get(pk=world.submit().pk)
    open_alert(run, Condition.KL_ABOVE, "KL to the reference: 63 nats.", 63.0, 50.0)
    webhooks.delete_webhook(ada, world.team, hook.pk)
    webhooks.restore_webhook(ada, world.team, hook.pk)
    deliver_due()
    assert len(receiver.came) == 1


def test_a_deleted_webhook_does_not_exist_for_any_other_change(world):
    hook, ada = add(world), world.people["ada"]
    webhooks.delete_webhook(ada, world.team, hook.pk)
    for change in (
        lambda: webhooks.change_webhook(ada, world.team, hook.pk, on=True, conditions=ALL),
        lambda: webhooks.delete_webhook(ada, world.team, hook.pk),
        lambda: webhooks.send_test(ada, world.team, hook.pk),
    ):
        with pytest.raises(Webhook.DoesNotExist):
            change()
    assert world.login("ada").get(f"/api/v1/teams/{world.team.pk}/webhooks").json()["items"] == []


def test_the_next_deletion_is_what_can_be_undone(world):
    first, second, ada = add(world), add(world), world.people["ada"]
    webhooks.delete_webhook(ada, world.team, first.pk)
    webhooks.delete_webhook(ada, world.team, second.pk)
    with pytest.raises(Webhook.DoesNotExist):
        webhooks.restore_webhook(ada, world.team, first.pk)
    assert list(Webhook.objects.values_list("pk", flat=True)) == [second.pk]


def test_a_restore_and_a_new_webhook_at_once_keep_the_limit(world, at_once, monkeypatch):
    monkeypatch.setattr(webhooks, "MAX_WEBHOOKS", 1)
    hook, ada = add(world), world.people["ada"]
    webhooks.delete_webhook(ada, world.team, hook.pk)
    results = at_once(lambda: webhooks.restore_webhook(ada, world.team, hook.pk), lambda: add(world))
    assert [type(result) for result in results].count(AccountError) == 1
    assert Webhook.objects.filter(deleted_at=None).count() == 1


def test_two_deletions_at_once_leave_one_to_restore(world, at_once):
    hooks, ada = [add(world), add(world)], world.people["ada"]
    at_once(*(lambda pk=hook.pk: webhooks.delete_webhook(ada, world.team, pk) for hook in hooks))
    assert Webhook.objects.filter(deleted_at__isnull=False).count() == Webhook.objects.count() == 1

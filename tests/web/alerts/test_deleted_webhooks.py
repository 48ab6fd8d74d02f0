"""Deleted webhooks get nothing, and can be restored for a day."""

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
    assert (f'id="hook-{hook.pk}"' in page, "/restore" in page) == (True, False)  # there is nothing more to undo
    webhooks.send_test(world.people["ada"], world.team, hook.pk)
    deliver_due()
    hook.refresh_from_db()
    assert (len(receiver.came), webhooks.decrypt_secret(hook)) == (1, secret)
    actions = AuditEntry.objects.filter(action__startswith="webhook").order_by("id").values_list("action", flat=True)
    assert list(actions) == ["webhook.create", "webhook.delete", "webhook.restore"]


def test_a_pending_message_is_sent_if_the_webhook_is_restored_before(world, receiver):
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


def test_a_second_restore_changes_nothing(world):
    hook, ada, client = add(world), world.people["ada"], world.login("ada")
    webhooks.delete_webhook(ada, world.team, hook.pk)
    path = f"/teams/{world.team.pk}/alerts/webhooks/{hook.pk}/restore"
    assert [client.post(path).status_code for _ in range(2)] == [302, 302]
    assert AuditEntry.objects.filter(action="webhook.restore").count() == 1


def test_a_day_later_it_is_deleted_permanently(world):
    first, second, ada = add(world), add(world), world.people["ada"]
    webhooks.delete_webhook(ada, world.team, first.pk)
    world.clock.advance(86_400 - 1)
    webhooks.delete_webhook(ada, world.team, second.pk)
    deliver_due()
    assert Webhook.objects.count() == 2
    world.clock.advance(2)
    deliver_due()
    assert list(Webhook.objects.values_list("pk", flat=True)) == [second.pk]
    with pytest.raises(Webhook.DoesNotExist):
        webhooks.restore_webhook(ada, world.team, first.pk)


def test_a_deleted_secret_gets_the_new_key_too(world):
    hook, ada = add(world), world.people["ada"]
    secret = webhooks.decrypt_secret(hook)
    webhooks.delete_webhook(ada, world.team, hook.pk)
    assert webhooks.reencrypt_secrets() == {"sealed": 1, "lost": []}
    webhooks.restore_webhook(ada, world.team, hook.pk)
    hook.refresh_from_db()
    assert webhooks.decrypt_secret(hook) == secret


def test_a_restore_and_a_new_webhook_at_once_keep_the_limit(world, at_once, monkeypatch):
    monkeypatch.setattr(webhooks, "MAX_WEBHOOKS", 1)
    hook, ada = add(world), world.people["ada"]
    webhooks.delete_webhook(ada, world.team, hook.pk)
    results = at_once(lambda: webhooks.restore_webhook(ada, world.team, hook.pk), lambda: add(world))
    assert [type(result) for result in results].count(AccountError) == 1
    assert Webhook.objects.filter(deleted_at=None).count() == 1


def test_of_two_deletions_at_once_one_does(world, at_once):
    hook, ada = add(world), world.people["ada"]
    results = at_once(*[lambda: webhooks.delete_webhook(ada, world.team, hook.pk)] * 2)
    assert [type(result) for result in results].count(Webhook.DoesNotExist) == 1
    assert AuditEntry.objects.filter(action="webhook.delete").count() == 1

"""Webhooks of chat services: their format, and that names are text in it."""

from __future__ import annotations

import json

import pytest

from oppo_platform.alerts import webhooks
from oppo_platform.alerts.delivery import deliver_due
from oppo_platform.alerts.lifecycle import open_alert, with_related
from oppo_platform.alerts.models import Webhook
from oppo_platform.alerts.policy import Condition
from oppo_platform.runs.models import Run

ALL = [condition.value for condition in Condition]


@pytest.fixture(autouse=True)
def keys(settings, tmp_path):
    """A folder for the keys of each test."""
    settings.OPPO_HOME, settings.OPPO_SECRETS_KEYS = tmp_path, []


@pytest.mark.parametrize("format", ["slack", "discord"])
def test_chat_services_get_their_own_format_in_which_names_are_text(world, receiver, format):
    webhooks.add_webhook(world.people["ada"], world.team, receiver.url, ALL, format)
    run = with_related(Run.objects).get(pk=world.submit(name="<!channel> *b* |x").pk)
    open_alert(run, Condition.KL_ABOVE, "KL to the reference: 63 nats.", 63.0, 50.0)
    webhooks.send_test(world.people["ada"], world.team, Webhook.objects.get().pk)
    while deliver_due():
        pass
    alert, test = sorted((json.loads(body) for _, _, body in receiver.came), key=lambda body: "Test message" in str(body))
    if format == "slack":
        place = f"<http://127.0.0.1:8000/runs/{run.pk}|&lt;!channel&gt; *b* ¦x #{run.pk}> KL above"
        assert alert["text"].startswith(place)
        assert "63 nats" in alert["text"]
        assert test["text"].startswith("OPPO: Test message")
    else:
        embed = alert["embeds"][0]
        assert (embed["title"], embed["url"]) == (rf"<!channel\> \*b\* \|x \#{run.pk}", f"http://127.0.0.1:8000/runs/{run.pk}")
        assert "63 nats" in embed["description"]
        assert alert["allowed_mentions"] == test["allowed_mentions"] == {"parse": []}
        assert test["content"].startswith("OPPO: Test message")


@pytest.mark.parametrize(
    ("url", "format"),
    [
        ("https://hooks.slack.com/services/T0/B0/x", "slack"),
        ("https://discord.com/api/webhooks/1/x", "discord"),
        ("https://discord.com/channels/1", "json"),
        ("https://example.org/hooks.slack.com", "json"),
    ],
)
def test_the_address_tells_the_format(url, format):
    assert webhooks.format_of(url) == format

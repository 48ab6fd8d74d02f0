"""Webhooks against a real https server: signed, bounded, and never led inside our network."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import socket
import threading

import pytest

from oppo_platform.accounts.models import AuditEntry
from oppo_platform.accounts.services import AccountError
from oppo_platform.alerts import webhooks
from oppo_platform.alerts.delivery import deliver_due
from oppo_platform.alerts.lifecycle import close_alert, open_alert, with_related
from oppo_platform.alerts.models import Delivery, Webhook
from oppo_platform.alerts.policy import Condition
from oppo_platform.alerts.url_policy import UrlNotAllowed
from oppo_platform.alerts.webhook_http import PostError, post
from oppo_platform.runs.models import Run

ALL = [condition.value for condition in Condition]


@pytest.fixture(autouse=True)
def keys(settings, tmp_path):
    """A folder for the keys of each test."""
    settings.OPPO_HOME, settings.OPPO_SECRETS_KEYS = tmp_path, []


@pytest.fixture
def hooked(world, receiver):
    """(world, run, receiver, secret): a team with a webhook, and a run of it."""
    secret = webhooks.add_webhook(world.people["ada"], world.team, f"{receiver.url}hook?team=1", ALL)
    return world, with_related(Run.objects).get(pk=world.submit().pk), receiver, secret


def told(run):
    return open_alert(run, Condition.KL_ABOVE, "KL to the reference: 63 nats.", 63.0, 50.0)


def test_a_message_is_signed_as_the_convention_wants(hooked):
    world, run, receiver, secret = hooked
    alert = told(run)
    assert deliver_due() == 1
    (path, headers, body), *_ = receiver.came
    headers = {name.lower(): value for name, value in headers.items()}
    assert path == "/hook?team=1"
    assert headers["host"] == f"localhost:{receiver.port}"
    # Exactly what docs/alerts.md tells a receiver to do.
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    expected = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == expected
    assert int(headers["webhook-timestamp"]) == int(world.clock.now().timestamp())
    message = json.loads(body)
    assert message["type"] == "alert.opened"
    assert message["data"]["alert"]["id"] == alert.pk
    assert (message["data"]["alert"]["value"], message["data"]["alert"]["unit"]) == (63.0, "nats per sequence")
    assert (message["data"]["run"]["name"], message["data"]["run"]["url"]) == ("demo", f"http://127.0.0.1:8000/runs/{run.pk}")
    assert f">#{run.pk}</span>" in world.login("ada").get(f"/teams/{world.team.pk}/alerts").content.decode()
    close_alert(run, Condition.KL_ABOVE, "It fell to 40.")
    deliver_due()
    assert json.loads(receiver.came[1][2])["type"] == "alert.closed"
    assert deliver_due() == 0


def test_a_receiver_that_fails_is_tried_five_times_within_the_hour(hooked):
    world, run, receiver, _ = hooked
    receiver.statuses = [500] * 9
    told(run)
    begun, tried = world.clock.now(), []
    for _ in range(120):
        if deliver_due():
            tried.append((world.clock.now() - begun).total_seconds())
        world.clock.advance(30)
    assert tried == [0, 60, 240, 780, 2400]
    delivery = Delivery.objects.get()
    assert (delivery.state, delivery.tries, delivery.status, delivery.error) == ("failed", 5, 500, "The receiver returned 500.")
    assert len({headers["webhook-id"] for _, headers, _ in receiver.came}) == 1
    assert len({body for _, _, body in receiver.came}) == 1
    page = world.login("ada").get(f"/teams/{world.team.pk}/alerts").content.decode()
    assert "failed</span> after" in page
    hook = Webhook.objects.get()
    part = f"/teams/{world.team.pk}/alerts?webhook={hook.pk}"
    assert "The receiver returned 500." in world.login("ada").get(part).content.decode()
    asked = {"ben": part, "eve": part, "max": part, "ada": f"/teams/{world.team.pk}/alerts?webhook={hook.pk + 1}"}
    assert {name: world.login(name).get(path).status_code for name, path in asked.items()} == {
        "ben": 403,
        "eve": 404,
        "max": 403,
        "ada": 404,
    }
    assert "The receiver returned 500." in page


def test_receiver_that_recovers_gets_one_delivery(hooked):
    world, run, receiver, _ = hooked
    receiver.statuses = [503]
    told(run)
    deliver_due()
    assert deliver_due() == 0  # not before its time
    world.clock.advance(60)
    assert deliver_due() == 1
    assert (Delivery.objects.get().state, len(receiver.came)) == ("sent", 2)
    world.clock.advance(10_000)
    assert deliver_due() == 0


def test_no_redirect_is_followed(hooked):
    _, run, receiver, _ = hooked
    receiver.statuses = [302]
    told(run)
    deliver_due()
    assert [path for path, _, _ in receiver.came] == ["/hook?team=1"]
    assert "redirect" in Delivery.objects.get().error


def test_concurrent_senders_deliver_once(hooked, at_once):
    _, run, receiver, _ = hooked
    told(run)
    assert sorted(at_once(deliver_due, deliver_due, deliver_due)) == [0, 0, 1]
    assert len(receiver.came) == 1


def test_delivery_claimed_by_a_dead_sender_is_sent_again(hooked, monkeypatch):
    from oppo_platform.alerts import delivery

    world, run, receiver, _ = hooked
    told(run)
    with monkeypatch.context() as killed:
        killed.setattr(delivery, "_deliver", lambda delivery: None)  # it dies before it sends
        deliver_due()
    assert deliver_due() == 0
    world.clock.advance(3600)
    assert deliver_due() == 1
    assert (Delivery.objects.get().tries, len(receiver.came)) == (2, 1)


def test_delivery_that_kills_its_sender_fails_after_all_tries(hooked, monkeypatch, settings):
    from oppo_platform.alerts import delivery

    world, run, receiver, _ = hooked
    settings.OPPO_DELIVERY_TRIES = 1
    told(run)
    with monkeypatch.context() as killed:
        killed.setattr(delivery, "_deliver", lambda delivery: None)
        deliver_due()
    world.clock.advance(3600)
    deliver_due()
    assert ("died" in Delivery.objects.get().error, Delivery.objects.get().state, receiver.came) == (True, "failed", [])


def test_a_private_peer_is_refused_whatever_its_name_says(hooked, settings, monkeypatch):
    """The name is resolved once, and what it resolves to is checked: also when it was a public one when the webhook was made."""
    _, run, receiver, _ = hooked
    settings.OPPO_WEBHOOK_PRIVATE_HOSTS = []
    told(run)
    deliver_due()
    delivery = Delivery.objects.get()
    assert (delivery.state, delivery.tries) == ("failed", 1)
    assert "is a private address" in delivery.error
    assert receiver.came == []


def test_a_name_with_one_inner_address_is_refused_and_resolved_once(receiver, settings, monkeypatch):
    asked = []

    def resolve(host, port, **options):
        asked.append(host)
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, ("93.184.215.14", port)), (*kind, ("10.1.2.3", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(UrlNotAllowed, match=r"10\.1\.2\.3 is a private address"):
        post("https://two-faced.example.org/", b"{}", {}, 5)
    assert asked == ["two-faced.example.org"]


def test_the_peer_of_the_connection_is_checked_too(receiver, settings, monkeypatch):
    """Whatever happens between the resolver and the connection."""
    settings.OPPO_WEBHOOK_PRIVATE_HOSTS = []
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **options: [(*kind, ("93.184.215.14", port))])
    real = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: real(self, ("127.0.0.1", receiver.port)))
    with pytest.raises(UrlNotAllowed, match=r"127\.0\.0\.1 is a private address"):
        post("https://rebound.example.org/", b"{}", {}, 5)
    assert receiver.came == []


def test_a_certificate_for_another_name_or_of_nobody_is_refused(receiver, monkeypatch, settings):
    settings.OPPO_WEBHOOK_PRIVATE_HOSTS = ["127.0.0.1", "localhost"]
    with pytest.raises(PostError, match="certificate is not valid"):
        post(f"https://127.0.0.1:{receiver.port}/", b"{}", {}, 5)
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(PostError, match="certificate is not valid"):
        post(receiver.url, b"{}", {}, 5)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 200 OK\r\n", b"no HTTP at all\r\n\r\n"])
def test_slow_or_invalid_responses_end_in_time(says, settings):
    """A plain peer that never ends its answer: the whole post ends within its time."""
    settings.OPPO_WEBHOOK_PRIVATE_HOSTS = settings.OPPO_WEBHOOK_PLAIN_HOSTS = ["localhost"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def answer():
            peer, _ = server.accept()
            held.append(peer)
            peer.sendall(says)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PostError, match=r"did not respond within|BadStatusLine"):
            post(f"http://localhost:{server.getsockname()[1]}/", b"{}", {}, 0.3)
        thread.join()
        held[0].close()


def test_refused_urls_are_reported_in_the_form(world):
    wrong = {"url": "http://example.org/", "conditions": ["failed"]}
    told = world.login("ada").post(f"/teams/{world.team.pk}/alerts/webhooks", wrong)
    page = told.content.decode()
    assert (told.status_code, "must use https" in page, 'value="http://example.org/"' in page) == (422, True, True)
    form = page.split('id="hook-url"')[1].split("</form>")[0]
    assert re.findall(r'value="(\w+)" checked', form) == ["failed"]
    assert not Webhook.objects.exists()


def test_secret_is_shown_once_and_stored_encrypted(world, receiver):
    ada = world.login("ada")
    reply = ada.post(f"/teams/{world.team.pk}/alerts/webhooks", {"url": receiver.url, "conditions": ["failed"]})
    secret = re.search(r'value="(whsec_[^"]+)"', reply.content.decode())[1]
    hook = Webhook.objects.get()
    assert (hook.conditions, webhooks.decrypt_secret(hook)) == (["failed"], secret)
    assert secret.encode() not in bytes(hook.sealed)
    assert secret not in ada.get(f"/teams/{world.team.pk}/alerts").content.decode()
    assert secret not in str(list(AuditEntry.objects.values("details", "target")))
    before = bytes(hook.sealed)
    assert webhooks.reencrypt_secrets() == {"sealed": 1, "lost": []}
    hook.refresh_from_db()
    assert (bytes(hook.sealed) != before, webhooks.decrypt_secret(hook)) == (True, secret)


def test_switched_off_and_test(hooked):
    world, run, receiver, _ = hooked
    ada, path = world.login("ada"), f"/teams/{world.team.pk}/alerts/webhooks/{Webhook.objects.get().pk}"
    ada.post(f"{path}/test")
    deliver_due()
    assert json.loads(receiver.came[0][2])["type"] == "alert.test"
    told(run)
    ada.post(path, {"conditions": ["failed"]})  # off
    deliver_due()
    assert len(receiver.came) == 1
    assert Delivery.objects.filter(state="failed", error="The webhook was disabled.").count() == 1
    ada.post(path, {"on": "on", "conditions": ["failed"]})
    close_alert(run, Condition.KL_ABOVE, "over")
    assert deliver_due() == 0  # not one of its conditions
    actions = AuditEntry.objects.filter(action__startswith="webhook").values_list("action", flat=True)
    assert set(actions) == {"webhook.create", "webhook.change"}


@pytest.mark.parametrize("deed", ["", "/delete", "/restore", "/test"])
def test_another_teams_webhook_does_not_exist_and_only_owners_see_one(hooked, deed):
    world, _, receiver, _ = hooked
    hook = Webhook.objects.get()
    if deed == "/restore":
        webhooks.delete_webhook(world.people["ada"], world.team, hook.pk)
    ours = f"/teams/{world.team.pk}/alerts/webhooks/{hook.pk}{deed}"
    assert world.login("eve").post(ours, {"conditions": ALL}).status_code == 404
    assert world.login("eve").post(f"/teams/{world.other_team.pk}/alerts/webhooks/{hook.pk}{deed}", {}).status_code == 404
    for name in ("vic", "ben", "max"):
        client = world.login(name)
        assert client.post(ours, {"conditions": ALL}).status_code == 403
        assert receiver.url not in client.get(f"/teams/{world.team.pk}/alerts").content.decode()


def test_old_deliveries_are_forgotten(hooked):
    world, run, _, _ = hooked
    told(run)
    deliver_due()
    world.clock.advance(31 * 86_400)
    deliver_due()
    assert not Delivery.objects.exists()


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "sub.localhost.", "10.1.2.3", "169.254.169.254", "[::1]", "[fe80::1]", "2130706433", "127.1"],
)
def test_inner_addresses_are_refused_when_they_are_entered(world, host):
    with pytest.raises(AccountError, match="is not allowed"):
        webhooks.add_webhook(world.people["ada"], world.team, f"https://{host}/hook", ALL)
    assert not Webhook.objects.exists()


def test_inner_addresses_that_the_operator_allows_are_accepted(world, settings):
    settings.OPPO_WEBHOOK_PRIVATE_HOSTS = ["10.1.2.3", "hooks.internal"]
    for host in settings.OPPO_WEBHOOK_PRIVATE_HOSTS:
        webhooks.add_webhook(world.people["ada"], world.team, f"https://{host}/hook", ALL)
    settings.OPPO_WEBHOOK_PRIVATE_HOSTS = ["169.254.169.254"]
    with pytest.raises(AccountError, match=r"169\.254"):
        webhooks.add_webhook(world.people["ada"], world.team, "https://169.254.169.254/latest", ALL)

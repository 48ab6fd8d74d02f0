"""Values of secrets appear in no answer, no log line, and nowhere in the database or its backup, whoever asks for what."""

from __future__ import annotations

import base64
import json

import pytest
from django.db import connection, transaction
from django.test import Client

from oppo_platform.accounts.team_secrets import set_secret
from oppo_platform.alerts.models import Webhook
from oppo_platform.alerts.webhooks import add_webhook
from tests.web.matrix.operations import OPERATIONS
from tests.web.matrix.pages import PAGES

VALUE = "hf_a-canary-of-the-team"
MAIL_PASSWORD = "a-canary-of-the-mail-server"


@pytest.fixture
def secret_values(world, scene, settings, tmp_path):
    """Every secret that the scene has: the team's, tokens, one-time links, passwords of servers, and the webhook's key."""
    settings.OPPO_HOME, settings.EMAIL_HOST_PASSWORD = tmp_path, MAIL_PASSWORD
    set_secret(world.people["ada"], world.team, "hub", VALUE)
    run = world.submit(secrets={"HF_TOKEN": "secret:hub"})
    worker = world.worker("node4", devices=8)
    world.cycle()
    claimed = worker.claim(run.attempts.get().pk).json()
    assert claimed["secrets"] == {"HF_TOKEN": VALUE}, "its engine gets it"
    Webhook.objects.all().delete()
    key = add_webhook(world.people["ada"], world.team, "https://example.org/hook", ["failed"])
    scene |= {"webhook": Webhook.objects.get().pk}
    tokens = [scene[name] for name in ("attempt_token", "other_attempt_token", "node_token")] + [worker.token, world.join_token]
    words = [token.rpartition("_")[2] for token in tokens]
    return [VALUE, MAIL_PASSWORD, settings.SECRET_KEY, key.removeprefix("whsec_"), *words]


def found_in(text: str, values: list[str]) -> list[str]:
    """The values that a text has, as they are, in base64 or in hexadecimal."""
    forms = {value: (value, base64.b64encode(value.encode()).decode().rstrip("="), value.encode().hex()) for value in values}
    return [value for value, shapes in forms.items() if any(shape in text for shape in shapes)]


def content(reply) -> str:
    """The body, of a download too."""
    if not reply.streaming:
        return reply.content.decode(errors="replace")
    return "" if reply.is_async else b"".join(reply.streaming_content).decode(errors="replace")


def test_no_answer_and_no_log_line_has_a_secret(world, scene, secret_values, capfd):
    ada: Client = world.login("ada")
    rows = [("/api/v1/", row) for row in OPERATIONS.values()] + [("", row) for row in PAGES]
    leaks = []
    for prefix, row in rows:
        path, body = row.filled(scene)
        text = json.dumps(body) if prefix and body is not None else ""
        with transaction.atomic():
            reply = ada.generic(row.method.upper(), f"{prefix}{path}", text, content_type="application/json")
            answer = f"{reply.headers} {content(reply)}"
            transaction.set_rollback(True)
        leaks += [f"{row.method} {prefix}{path}: {value}" for value in found_in(answer, secret_values)]
    assert not leaks
    assert not found_in("".join(capfd.readouterr()), secret_values), "in the log"


def test_no_row_of_the_database_has_a_secret(world, scene, secret_values):
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT t::text FROM "{table}" t')
            rows = "\n".join(row[0] for row in cursor.fetchall())
            assert not found_in(rows, secret_values), table

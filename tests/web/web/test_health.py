"""The health check and responses without a database, through the whole stack of middleware."""

import psycopg
import pytest
from django.db import IntegrityError, InterfaceError, OperationalError, connection
from django.db.migrations.recorder import MigrationRecorder
from django.test import Client
from psycopg import errors
from psycopg_pool import PoolTimeout
from structlog.testing import capture_logs

from oppo_platform.accounts.api_tokens import create_api_token
from oppo_platform.web import health
from oppo_platform.web.health import is_database_outage, missing_migrations, wait_for_migrations


@pytest.mark.django_db
def test_healthz_answers_without_login_and_with_security_headers(client):
    reply = client.get("/healthz")
    assert reply.status_code == 200
    assert reply.json() == {"ok": True}
    assert "script-src 'self'" in reply.headers["Content-Security-Policy"]
    assert reply.headers["X-Frame-Options"] == "DENY"


@pytest.fixture
def unapplied(transactional_db):
    """The record of the newest migration of runs is away; yields its name and a function that brings it back."""
    recorder = MigrationRecorder(connection)
    name = recorder.Migration.objects.filter(app="runs").latest("id").name
    recorder.record_unapplied("runs", name)

    def apply() -> None:
        if not recorder.Migration.objects.filter(app="runs", name=name).exists():
            recorder.record_applied("runs", name)

    yield name, apply
    apply()


def test_web_waits_until_every_migration_is_applied_and_says_so_once(unapplied, lose_connection, monkeypatch):
    name, apply = unapplied
    assert missing_migrations() == [("runs", name)]
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            lose_connection()  # the database restarts meanwhile: the next query fails
        if len(naps) == 4:
            apply()

    monkeypatch.setattr(health.time, "sleep", nap)
    with capture_logs() as lines:
        wait_for_migrations()
    assert len(naps) == 4
    assert [(line["event"], line["first"], line["missing"]) for line in lines] == [("waiting_for_migrations", f"runs.{name}", 1)]
    assert connection.connection is None
    assert missing_migrations() == []


def test_web_starts_at_once_without_a_database(transactional_db, monkeypatch):
    monkeypatch.setattr(health.time, "sleep", lambda _: pytest.fail("it waits"))
    monkeypatch.setitem(connection.settings_dict, "PORT", "1")
    with capture_logs() as lines:
        wait_for_migrations()
    assert [line["event"] for line in lines] == ["migrations_not_checked"]
    assert "Connection refused" in lines[0]["detail"]


@pytest.fixture
def lose_connection(transactional_db):
    """Let the server end this thread's connection, as when it is restarted."""

    def lose() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            [pid] = cursor.fetchone()
        with psycopg.connect(**connection.get_connection_params() | {"cursor_factory": None}) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])

    yield lose
    connection.close()


@pytest.mark.parametrize("key", [{}, {"Idempotency-Key": "7"}])
def test_api_answers_503_with_retry_after_during_an_outage(lose_connection, world, key):
    token = create_api_token(world.people["ada"], world.team, "notebook", scope="admin").text
    client = Client(headers={"Authorization": f"Bearer {token}"} | key, raise_request_exception=False)
    lose_connection()
    reply = client.post("/api/v1/runs", {"spec": {}}, content_type="application/json")
    assert (reply.status_code, reply.headers["Retry-After"]) == (503, "5")
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert reply.json()["detail"] == "The database cannot be reached. Runs continue; try again later."
    connection.close()  # as at the end of a request
    assert client.get("/api/v1/runs").status_code == 200


def test_worker_api_answers_503_during_an_outage(lose_connection, world):
    worker = world.worker()
    _, attempt = world.start(worker)
    worker.client.raise_request_exception = False
    lose_connection()
    reply = worker.attempt(attempt, "heartbeat", {"epoch": 1, "running": True})
    assert (reply.status_code, reply.headers["Retry-After"]) == (503, "5")
    connection.close()
    assert worker.attempt(attempt, "heartbeat", {"epoch": 1, "running": True}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/queue"])
def test_page_says_that_the_database_is_unavailable_and_reloads(lose_connection, world, path):
    client = world.login("ada", raise_request_exception=False)
    lose_connection()
    reply = client.get(path)
    assert (reply.status_code, reply.headers["Refresh"], reply.headers["Retry-After"]) == (503, "5", "5")
    assert "The database cannot be reached" in reply.content.decode()
    connection.close()
    assert client.get(path, follow=True).status_code == 200


def test_healthz_is_503_during_an_outage(lose_connection, client):
    lose_connection()
    assert client.get("/healthz").status_code == 503
    assert client.get("/healthz").status_code == 503  # the connection is closed now: an InterfaceError
    connection.close()
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("kind", "cause", "outage"),
    [
        (OperationalError, errors.AdminShutdown(), True),
        (OperationalError, errors.ConnectionFailure(), True),
        (OperationalError, errors.TooManyConnections(), True),
        (OperationalError, psycopg.OperationalError("connection refused"), True),
        (OperationalError, PoolTimeout(), True),
        (InterfaceError, psycopg.InterfaceError("the connection is closed"), True),
        (OperationalError, errors.LockNotAvailable(), False),
        (OperationalError, errors.QueryCanceled(), False),
        (OperationalError, errors.DiskFull(), False),
        (IntegrityError, errors.UniqueViolation(), False),
    ],
)
def test_only_lost_connections_are_outages(kind, cause, outage):
    error = kind("x")
    error.__cause__ = cause
    assert is_database_outage(error) is outage


def test_other_errors_are_no_outage():
    assert not is_database_outage(None)
    assert not is_database_outage(ZeroDivisionError())

"""Readiness: migrations before the start, an endpoint for load balancers, the response while the database is away."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

import psycopg
import structlog
from django.contrib.auth.decorators import login_not_required
from django.db import Error, InterfaceError, OperationalError, connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string
from django.views.defaults import server_error

RETRY_AFTER_S = 5
MIGRATIONS_POLL_S = 0.2
CONNECT_TIMEOUT_S = 2
# SQLSTATE of errors that end a connection or prevent one: 08 connection exception, 57P01 to 57P03 the server stops or starts,
# 53300 too many connections. None: no response from the server.
OUTAGE = (None, "57P01", "57P02", "57P03", "53300")

log = structlog.get_logger("web")


def check_connection(timeout_s: int) -> None:
    """Connect once, beside the pool, which would hide the reason for longer. Raises psycopg's OperationalError."""
    psycopg.connect(**connection.get_connection_params() | {"cursor_factory": None, "connect_timeout": timeout_s}).close()


def missing_migrations() -> list[tuple[str, str]]:
    """App and name of each migration that the database lacks. Raises `django.db.Error` if it cannot be read."""
    executor = MigrationExecutor(connection)
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    return [(migration.app_label, migration.name) for migration, _ in plan]


def wait_for_migrations() -> None:
    """Block until every migration is applied: against an older schema requests would fail. Logs once that it waits.

    Returns at once when the database cannot be reached: requests are answered with 503 then.
    """
    try:
        check_connection(CONNECT_TIMEOUT_S)
        missing = missing_migrations()
    except (Error, psycopg.OperationalError) as error:
        log.warning("migrations_not_checked", detail=str(error).strip())
        return
    finally:
        connection.close()
    if missing:
        log.info("waiting_for_migrations", missing=len(missing), first=".".join(missing[0]), detail="`oppo migrate` applies them")
    while missing:
        time.sleep(MIGRATIONS_POLL_S)
        with suppress(OperationalError, InterfaceError):  # the database restarts; its schema is as old as before
            applied = MigrationRecorder(connection).applied_migrations()
            missing = [migration for migration in missing if migration not in applied]
        connection.close()


@login_not_required
def healthz(request: HttpRequest) -> JsonResponse:
    """200 `{"ok": true}` when the database answers, 503 otherwise."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except Error as error:
        return JsonResponse({"ok": False, "database": type(error).__name__}, status=503)
    return JsonResponse({"ok": True})


def is_database_outage(error: BaseException | None) -> bool:
    """Whether a database error means that the server cannot be reached, so that the same request may succeed later."""
    if not isinstance(error, (OperationalError, InterfaceError)):
        return False
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    return sqlstate in OUTAGE or str(sqlstate).startswith("08")


def error_page(request: HttpRequest) -> HttpResponse:
    """`handler500`: 503 during a database outage, with a page that reloads itself, otherwise Django's 500."""
    if not is_database_outage(sys.exc_info()[1]):
        return server_error(request)
    response = HttpResponse(render_to_string("503.html"), status=503, headers={"Retry-After": str(RETRY_AFTER_S)})
    if request.method == "GET":
        response.headers["Refresh"] = str(RETRY_AFTER_S)
    return response

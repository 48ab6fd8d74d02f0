"""The checks of `oppo doctor`. Each one needs nothing of the others, and says what to do about what it finds."""

from __future__ import annotations

import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import redis
from django.conf import settings
from django.core.mail import get_connection
from django.db import DatabaseError, OperationalError, connection

from oppo_contract.byte_sizes import size
from oppo_contract.wire import SUPPORTED_VERSIONS
from oppo_platform import clock
from oppo_platform.accounts.api_tokens import create_api_token
from oppo_platform.accounts.models import ApiToken, Role, User
from oppo_platform.cluster.disks import describe_low_disks
from oppo_platform.cluster.models import DeviceState, Node
from oppo_platform.cluster.selectors import live_nodes, version_problem
from oppo_platform.runs.models import Run
from oppo_platform.scheduling.models import SchedulerBeat
from oppo_platform.storage.database_disk import free_bytes
from oppo_platform.telemetry.models import HousekeeperBeat
from oppo_platform.tokens import parse_token
from oppo_platform.web.health import missing_migrations

Status = Literal["ok", "warning", "failed", "skipped"]
TIMEOUT_S = 5.0
MAX_SKEW_S = 5.0
MIN_CERTIFICATE_DAYS = 14
MAX_AGE_S = {"scheduler": 30.0, "housekeeper": 300.0}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check; `advice`: what to do about it, empty if nothing."""

    check: str
    status: Status
    detail: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


Check = Callable[[], Iterator[Finding]]


def run_checks() -> Iterator[Finding]:
    """Every check in turn. Without a database the ones that read it are left out."""
    for check in (check_home, check_database, check_broker):
        yield from _guarded(check)
    if not _database_answers():
        return
    for check in (check_services, check_web, check_stream, check_mail, check_nodes):
        yield from _guarded(check)


def check_home() -> Iterator[Finding]:
    """The folder of keys, logs and, by default, checkpoints."""
    usage = shutil.disk_usage(settings.OPPO_HOME)
    detail = f"{settings.OPPO_HOME}, {size(usage.free)} of {size(usage.total)} free"
    low = usage.free < settings.OPPO_LOW_DISK_BYTES
    yield Finding("disk of OPPO_HOME", "warning" if low else "ok", detail, "Free some space." if low else "")


def check_database() -> Iterator[Finding]:
    """Connection, version, migrations, clock and disk."""
    try:
        with connection.cursor() as cursor:
            before = time.time()
            cursor.execute("SELECT current_setting('server_version'), extract(epoch FROM clock_timestamp())")
            version, at = cursor.fetchone()
    except OperationalError as error:
        yield Finding("database", "failed", str(error).strip().splitlines()[0], "Start PostgreSQL, or correct DATABASE_URL.")
        return
    yield Finding("database", "ok", f"PostgreSQL {version}")
    yield _skew("clock of the database", float(at) - (before + time.time()) / 2)
    if missing := missing_migrations():
        names = ", ".join(map(".".join, missing[:3]))
        yield Finding("migrations", "failed", f"{len(missing)} are missing: {names}", "Run `oppo migrate`.")
    else:
        yield Finding("migrations", "ok", "all are applied")
        free = free_bytes()
        if free is not None:
            low = free < settings.OPPO_LOW_DISK_BYTES
            advice = "Free some space, or shorten retention: new runs are refused." if low else ""
            yield Finding("disk of the database", "failed" if low else "ok", f"{size(free)} free", advice)


def check_broker() -> Iterator[Finding]:
    """Valkey or Redis: launches wait for heartbeats without it, and request limits do not count."""
    try:
        with redis.Redis.from_url(settings.REDIS_URL, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as server:
            version = server.info("server").get("redis_version", "?")
    except redis.RedisError as error:
        yield Finding("broker", "failed", f"{type(error).__name__}: {error}", "Start Valkey or Redis, or correct REDIS_URL.")
        return
    yield Finding("broker", "ok", f"speaks Redis {version}")


def check_services() -> Iterator[Finding]:
    """The last cycle of the scheduler and the last round of the housekeeper."""
    scheduler, housekeeper = SchedulerBeat.objects.first(), HousekeeperBeat.objects.first()
    last = {"scheduler": scheduler and scheduler.last_cycle_at, "housekeeper": housekeeper and housekeeper.last_round_at}
    for name, at in last.items():
        age_s = (clock.now() - at).total_seconds() if at is not None else None
        well = age_s is not None and age_s <= MAX_AGE_S[name]
        detail = f"worked {age_s:.0f} s ago" if age_s is not None else "has never worked"
        yield Finding(name, "ok" if well else "failed", detail, "" if well else f"Start `oppo {name}`, and read its log.")


def check_web() -> Iterator[Finding]:
    """The address that users and workers use, with its certificate and the clock of what answers."""
    url = f"{settings.OPPO_BASE_URL}/healthz"
    try:
        before = time.time()
        reply = httpx.get(url, timeout=TIMEOUT_S)
    except httpx.HTTPError as error:
        yield Finding("web", "failed", f"{url}: {error}", "Start `oppo web`, or correct OPPO_BASE_URL or the proxy.")
        return
    ours = reply.status_code == 200 and reply.json() == {"ok": True} if "json" in reply.headers.get("Content-Type", "") else False
    if not ours:
        yield Finding(
            "web", "failed", f"{url} answers {reply.status_code}, and not as this platform does",
            "The proxy leads elsewhere: compare its target with `oppo web --port`.",
        )  # fmt: skip
        return
    yield Finding("web", "ok", url)
    if date := reply.headers.get("Date"):
        yield _skew("clock of the web server", parsedate_to_datetime(date).timestamp() - before, tolerance_s=MAX_SKEW_S + 1)
    if urlsplit(url).scheme == "https":
        yield _certificate(urlsplit(url).hostname or "", urlsplit(url).port or 443)


def check_stream() -> Iterator[Finding]:
    """Whether live updates arrive at once through the proxy, as one user of the newest run sees them."""
    run = Run.objects.select_related("project__team").order_by("-pk").first()
    owner = run and User.objects.filter(memberships__team=run.project.team, memberships__role=Role.OWNER, is_active=True).first()
    if run is None or owner is None:
        yield Finding("live updates", "skipped", "there is no run yet")
        return
    url = f"{settings.OPPO_BASE_URL}/api/v1/stream?runs={run.pk}"
    with _temporary_token(owner, run) as token, httpx.Client(timeout=TIMEOUT_S) as client:
        try:
            with client.stream("GET", url, headers={"Authorization": f"Bearer {token}"}) as reply:
                if reply.status_code != 200:
                    yield Finding("live updates", "failed", f"{url} answers {reply.status_code}", "Read the web server's log.")
                    return
                next(reply.iter_bytes())
        except (httpx.HTTPError, StopIteration):
            yield Finding(
                "live updates", "failed", f"no event arrived within {TIMEOUT_S:.0f} s",
                "The proxy holds responses back: switch its buffering off for /api/v1/stream (docs/operations.md).",
            )  # fmt: skip
            return
    yield Finding("live updates", "ok", "arrive at once")


def check_mail() -> Iterator[Finding]:
    """The mail server's greeting and login; nothing is sent."""
    if not settings.OPPO_SMTP_URL:
        yield Finding("mail", "skipped", "OPPO_SMTP_URL is not set: links are copied by hand")
        return
    server = get_connection(fail_silently=False)
    try:
        server.open()
    except (OSError, socket.gaierror) as error:  # SMTPException is an OSError
        yield Finding("mail", "failed", f"{type(error).__name__}: {error}", "Correct OPPO_SMTP_URL.")
        return
    finally:
        server.close()
    yield Finding("mail", "ok", f"{settings.EMAIL_HOST} accepts the login")


def check_nodes() -> Iterator[Finding]:
    """Connection, version, clock, disks and devices of each node."""
    nodes = list(Node.objects.prefetch_related("devices").order_by("name"))
    live, low = set(live_nodes().values_list("pk", flat=True)), describe_low_disks()
    if not nodes:
        yield Finding(
            "nodes", "warning", "no worker has joined", "Join one: `oppo worker join URL TOKEN`, then `oppo worker run`."
        )
    for node in nodes:
        name = f"node {node.name}"
        if node.pk not in live:
            seen = f"last seen {node.last_seen_at:%Y-%m-%d %H:%M} UTC" if node.last_seen_at else "never seen"
            yield Finding(name, "warning", f"silent, {seen}", "Start `oppo worker run` there, or drain it on the cluster page.")
            continue
        if problem := version_problem(node):
            yield Finding(name, "failed", problem, f"Install a version that speaks {' or '.join(map(str, SUPPORTED_VERSIONS))}.")
        if node.pk in low:
            yield Finding(name, "warning", low[node.pk], "Free some space there: it gets no new work.")
        if node.clock_skew_s is not None and abs(node.clock_skew_s) > MAX_SKEW_S:
            yield _skew(f"clock of {name}", node.clock_skew_s)
        broken = [device for device in node.devices.all() if device.state == DeviceState.QUARANTINED]
        if broken:
            yield Finding(name, "warning", f"{len(broken)} devices are out of use", "The cluster page says why.")
        if not problem:
            yield Finding(name, "ok", f"{len(node.devices.all())} devices")


def _guarded(check: Check) -> Iterator[Finding]:
    """A check that fails itself is a finding: the others still run."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - whatever is broken here
        name = check.__name__.removeprefix("check_")
        yield Finding(name, "failed", f"the check ended with {type(error).__name__}: {error}", "Report this with --bundle.")


def _database_answers() -> bool:
    try:
        connection.ensure_connection()
        return "runs_run" in connection.introspection.table_names()
    except DatabaseError:
        return False


def _skew(check: str, seconds: float, tolerance_s: float = MAX_SKEW_S) -> Finding:
    if abs(seconds) <= tolerance_s:
        return Finding(check, "ok", f"{abs(seconds):.1f} s from this machine's")
    where = "ahead of" if seconds > 0 else "behind"
    return Finding(check, "warning", f"{abs(seconds):.0f} s {where} this machine's", "Synchronise the clocks (NTP).")


def _certificate(host: str, port: int) -> Finding:
    with (
        socket.create_connection((host, port), TIMEOUT_S) as raw,
        ssl.create_default_context().wrap_socket(raw, server_hostname=host) as secured,
    ):
        ends: Any = secured.getpeercert() or {}
    days = (datetime.fromtimestamp(ssl.cert_time_to_seconds(ends["notAfter"]), UTC) - datetime.now(UTC)).days
    soon = days < MIN_CERTIFICATE_DAYS
    return Finding(
        "TLS", "warning" if soon else "ok", f"the certificate of {host} is valid for {days} days", "Renew it." if soon else ""
    )


@contextmanager
def _temporary_token(user: User, run: Run) -> Iterator[str]:
    created = create_api_token(user, run.project.team, "oppo doctor", days=1 / 24, scope="read")
    try:
        yield created.text
    finally:
        ApiToken.objects.filter(prefix=(parse_token(created.text, "api") or ("",))[0]).delete()

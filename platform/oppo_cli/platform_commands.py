"""Commands that run single services of the platform (production) or manage its users."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from typing import Any

import click

from oppo_cli.home import Failure, Home, Refusal

SHUTDOWN_TIMEOUT_S = 3
M_ARENA_MAX = -8  # of <malloc.h>
SCHEDULER_MAX_AGE_S = 30.0
HOUSEKEEPER_MAX_AGE_S = 300.0  # a round may compact many runs


def limit_malloc_arenas(most: int = 2) -> None:
    """Limit the number of glibc's malloc arenas, unless `MALLOC_ARENA_MAX` is set. Call before threads start.

    By default threads use up to eight arenas per core, and each keeps most of the memory that it ever needed: `web`, whose 30
    threads run Python code one at a time, grew by 9 MiB an hour.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and "MALLOC_ARENA_MAX" not in os.environ:  # not on macOS
        libc.mallopt(M_ARENA_MAX, most)


@contextmanager
def platform_servers(*, locked: bool = False) -> Iterator[None]:
    """Ensure DATABASE_URL: as set, of the running `oppo up`, or of a database started for this command.

    Args:
        locked: the caller holds the lock of the home, so no `oppo up` is running.
    """
    if not locked:
        use_running_platform()
    if os.environ.get("DATABASE_URL"):
        yield
        return
    from oppo_platform import embedded

    try:
        with embedded.postgres(Home.from_environment().path) as url:
            os.environ["DATABASE_URL"] = url
            yield
    except embedded.ServerError as error:
        raise Failure(str(error)) from error


def use_running_platform() -> None:
    """Set the variables of the running `oppo up`, if there is one and DATABASE_URL is not set."""
    running = None if os.environ.get("DATABASE_URL") else Home.from_environment().running()
    if running is not None:
        os.environ.update({key: value for key, value in running.environ().items() if not os.environ.get(key)})


def set_up_django() -> None:
    """Load Django with the platform's settings. Raises Refusal for an invalid setting."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "oppo_platform.settings")
    import django
    from django.core.exceptions import ImproperlyConfigured

    try:
        django.setup()
    except ImproperlyConfigured as error:
        raise Refusal(str(error)) from error


@contextmanager
def _accounts() -> Iterator[None]:
    """Django with a database; account errors are raised as `Refusal`."""
    with platform_servers():
        set_up_django()
        from oppo_platform.accounts.services import AccountError

        try:
            yield
        except AccountError as error:
            raise Refusal(str(error)) from error


@click.group()
def admin() -> None:
    """Manage users, teams and tokens."""


@admin.command("create")
@click.argument("username")
@click.option("--email", help="Default: USERNAME@localhost.localdomain.")
def admin_create(username: str, email: str | None) -> None:
    """Create an administrator with a generated password, which is shown once.

    The first administrator gets a team with a project; later ones become owners of that team.
    """
    with _accounts():
        from oppo_platform.accounts.models import Role, Team, User
        from oppo_platform.accounts.services import create_login_link, create_user
        from oppo_platform.projects.services import ensure_first_user

        address = email or f"{username}@localhost.localdomain"
        if User.objects.exists():
            created = create_user(username, address, Team.objects.order_by("id").first(), Role.OWNER, administers=True)
        else:
            created = ensure_first_user(username, address)
        click.echo(f"User: {created.user.username}\nPassword: {created.password}  (shown once)")
        click.echo(f"Login link: {create_login_link(created.user)}")


@admin.command("token")
@click.argument("user")
@click.option("--name", default="terminal", show_default=True, help="Name of the token.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="Validity. Default: never expires.")
@click.option(
    "--scope", type=click.Choice(["read", "submit", "admin"]), default="submit", show_default=True, help="Scope of the token."
)
def admin_token(user: str, name: str, days: float | None, scope: str) -> None:
    """Print an API token of USER (name or email) for their first team; it is shown once."""
    with _accounts():
        from oppo_platform.accounts.api_tokens import create_api_token
        from oppo_platform.accounts.models import Team
        from oppo_platform.accounts.services import find_user

        owner = find_user(user)
        team = Team.objects.filter(memberships__user=owner).order_by("id").first()
        if team is None:
            raise Refusal(f"{user} is not in a team, and a token belongs to a team member.")
        click.echo(create_api_token(owner, team, name, days, scope).text)


@admin.command("join-token")
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), default=24.0, show_default=True, help="Validity.")
def join_token(hours: float) -> None:
    """Print a join token for workers; it is shown once."""
    with _accounts():
        from oppo_platform.cluster.services import create_join_token

        click.echo(create_join_token(hours))


@admin.command("team")
@click.argument("name")
@click.argument("owner")
def admin_team(name: str, owner: str) -> None:
    """Create a team NAME with OWNER (name or email) as its owner. Owners invite members in the browser."""
    with _accounts():
        from oppo_platform.accounts.services import create_team, find_user

        click.echo(f"{create_team(name, find_user(owner)).name} was created; its owner is {owner}.")


@admin.command("rotate-secrets")
def admin_rotate_secrets() -> None:
    """Create a new key for team secrets and re-encrypt all of them; the previous key is kept until the next rotation.

    With OPPO_SECRETS_KEYS, first prepend the new key there and restart.
    """
    with platform_servers():
        set_up_django()
        from django.conf import settings

        from oppo_platform.accounts.encryption import add_key
        from oppo_platform.accounts.team_secrets import reencrypt_all
        from oppo_platform.alerts.webhooks import reencrypt_secrets

        if not settings.OPPO_SECRETS_KEYS:
            add_key()
        secrets, hooks = reencrypt_all(), reencrypt_secrets()
        click.echo(f"{secrets['sealed'] + hooks['sealed']} secrets are encrypted with the newest key.")
        if lost := secrets["lost"] + hooks["lost"]:
            raise Failure("No key decrypts these; an owner must set them again: " + ", ".join(lost))


@admin.command("password-link")
@click.argument("user")
def admin_password_link(user: str) -> None:
    """Print a link for USER (name or email) to set a new password; valid once, for a day."""
    with _accounts():
        from oppo_platform.accounts.passwords import create_password_link
        from oppo_platform.accounts.services import find_user

        click.echo(create_password_link(None, find_user(user)))


@click.command("login-link")
@click.argument("user")
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), default=24.0, show_default=True, help="Validity.")
def login_link(user: str, hours: float) -> None:
    """Print a one-time login link for USER (name or email)."""
    with _accounts():
        from oppo_platform.accounts.services import create_login_link, find_user

        click.echo(create_login_link(find_user(user), hours))


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def manage(arguments: tuple[str, ...]) -> None:
    """Run a Django management command, as manage.py does."""
    with platform_servers():
        set_up_django()
        from django.core.management import execute_from_command_line

        execute_from_command_line(["oppo manage", *arguments])


@click.command()
def migrate() -> None:
    """Build the static files and migrate the database; for production, before web and scheduler start."""
    with platform_servers():
        set_up_django()
        from django.core.management import call_command

        call_command("buildstatic")
        call_command("migrate", interactive=False)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port to listen on.")
def web(host: str, port: int) -> None:
    """Serve pages, API and live updates, in one process. Waits until `oppo migrate` has applied every migration."""
    _start_service()
    limit_malloc_arenas()
    set_up_django()
    import uvicorn

    import_module("oppo_platform.asgi")  # while the database is migrated
    from oppo_platform.web.health import wait_for_migrations

    wait_for_migrations()
    options: dict[str, Any] = {"lifespan": "off", "access_log": False, "log_level": "warning", "proxy_headers": False}
    uvicorn.run("oppo_platform.asgi:application", host=host, port=port, timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S, **options)


@click.command()
@click.option("--check", is_flag=True, help="Only check the health: exit 0 when the last cycle is recent, otherwise 1.")
@click.option("--once", is_flag=True, help="Run one cycle and exit.")
@click.option(
    "--explain", "explain_plan", is_flag=True, help="Print the plan as a table and exit; without --once nothing is changed."
)
def scheduler(check: bool, once: bool, explain_plan: bool) -> None:
    """Allocate devices to waiting runs."""
    _start_service()
    set_up_django()
    if check:
        _check_scheduler()
    elif once or explain_plan:
        from oppo_cli.scheduler_explain import explain

        explain(once)
    else:
        from django.core.management import call_command

        call_command("scheduler")


def _check_scheduler() -> None:
    from oppo_platform.scheduling.models import SchedulerBeat

    beat = SchedulerBeat.objects.first()
    _check_beat("scheduler", "cycle", beat and beat.last_cycle_at, SCHEDULER_MAX_AGE_S)


@click.command()
@click.option("--check", is_flag=True, help="Only check the health: exit 0 when the last round is recent, otherwise 1.")
def housekeeper(check: bool) -> None:
    """Compact metrics, apply retention rules and delete expired data, round after round."""
    _start_service()
    set_up_django()
    if not check:
        from django.core.management import call_command

        call_command("housekeeper")
        return
    from oppo_platform.telemetry.models import HousekeeperBeat

    beat = HousekeeperBeat.objects.first()
    _check_beat("housekeeper", "round", beat and beat.last_round_at, HOUSEKEEPER_MAX_AGE_S)


def _check_beat(service: str, unit: str, last_at: datetime | None, max_age_s: float) -> None:
    """Print the age of the last heartbeat. Raises Failure if it is older than `max_age_s`."""
    from oppo_platform import clock

    age_s = (clock.now() - last_at).total_seconds() if last_at is not None else float("inf")
    if age_s > max_age_s:
        raise Failure(f"No {service} has worked " + ("yet." if last_at is None else f"for {age_s:.0f} s."))
    click.echo(f"The last {unit} was {age_s:.1f} s ago.")


def _start_service() -> None:
    """Common start of the services: end with `oppo up`; require DATABASE_URL."""
    from oppo_contract.lifeline import watch_lifeline

    watch_lifeline()
    use_running_platform()
    if not os.environ.get("DATABASE_URL"):
        raise Refusal("DATABASE_URL is not set. Set it to a PostgreSQL URL, or run `oppo up`, which starts its own.")
    sys.argv = ["oppo"]

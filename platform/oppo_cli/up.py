"""`oppo up`: everything on this machine."""

from __future__ import annotations

import click

from oppo_cli.home import Home
from oppo_cli.stack import Prepared, Stack


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), help="HTTP port. Default: 8000 or a free port; the choice is saved.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
def up(port: int | None, host: str) -> None:
    """Start the platform: database, broker, web, scheduler and one worker.

    Data lives in OPPO_HOME (default: .oppo). Ctrl-C stops everything. DATABASE_URL and REDIS_URL name servers to use
    instead of the built-in ones.
    """
    home = Home.from_environment()
    with home.locked(), Stack(home, port=port, host=host) as stack:
        stack.watch.catch_stop()
        print_welcome(stack.start(), stack.base_url)
        stack.keep_alive()
        click.echo("Stopping…")


def print_welcome(prepared: Prepared, base_url: str) -> None:
    """The address, at the first start the password, which is shown once, and how a terminal logs in."""
    click.echo(f"\nOPPO runs at {base_url}")
    if prepared.password is not None:
        click.echo(f"First user: {prepared.username}, password: {prepared.password}  (shown once)")
    click.echo(f"One-time login link: {prepared.login_link}")
    click.echo(f"From a terminal on this machine: oppo admin token {prepared.username} | oppo login {base_url}\n")

"""`oppo up`: the platform on this machine."""

from __future__ import annotations

import click

from oppo_cli.home import Home
from oppo_cli.stack import SetupResult, Stack


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
        print_welcome(stack.start(), stack.base_url)
        stack.keep_alive()
        click.echo("Stopping…")


def print_welcome(setup: SetupResult, base_url: str) -> None:
    """Print the URL, the login link, the password at the first start, and the command for a terminal login."""
    click.echo(f"\nOPPO runs at {base_url}")
    if setup.password is not None:
        click.echo(f"First user: {setup.username}, password: {setup.password}  (shown once)")
    click.echo(f"One-time login link: {setup.login_link}")
    click.echo(f"From a terminal on this machine: oppo admin token {setup.username} | oppo login {base_url}\n")

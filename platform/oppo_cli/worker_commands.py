"""`oppo worker`: this machine as a node of a cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from oppo_cli.home import Failure


@click.group()
def worker() -> None:
    """Offer this machine's devices to a platform."""


@worker.command()
@click.argument("url")
@click.argument("token")
@click.option("--name", help="The node's name. Default: the host name.")
@click.option(
    "--models-root", "models_roots", multiple=True, type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with models and prompts to offer; may be given several times.",
)  # fmt: skip
def join(url: str, token: str, name: str | None, models_roots: tuple[Path, ...]) -> None:
    """Join the platform at URL with a join TOKEN (`-` reads it from standard input).

    The node's identity is kept in OPPO_HOME/worker. Joining again renews it.
    """
    from worker.folders import WorkerFolder
    from worker.joining import join_platform
    from worker.platform_api import RefusedError, UnacceptableError, Unreachable

    secret = sys.stdin.read().strip() if token == "-" else token  # noqa: S105 - the dash, not a password
    folder = WorkerFolder.from_environment()
    try:
        identity = join_platform(folder, url, secret, list(models_roots), name)
    except Unreachable as error:
        raise Failure(f"The platform at {url} does not answer: {error}") from error
    except RefusedError as error:
        raise Failure(f"The platform refused the token: {error}. Ask for a new one; it is valid for a limited time.") from error
    except UnacceptableError as error:
        raise Failure(f"The platform does not understand this worker: {error}") from error
    click.echo(f"Joined {url} as {identity.name}. Start it with: oppo worker run")


@worker.command()
@click.option("--keep-attempts", is_flag=True, help="Let running attempts go on when this process is stopped (service restarts).")
def run(keep_attempts: bool) -> None:
    """Work for the platform that this machine has joined."""
    arguments = ["--keep-attempts"] if keep_attempts else []
    os.execv(sys.executable, [sys.executable, "-m", "worker", "agent", *arguments])  # noqa: S606

"""`oppo worker`: join this machine to a cluster as a node, and run its agent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from oppo_cli.home import Failure, Refusal


@click.group()
def worker() -> None:
    """Run this machine as a node of a platform."""


MODELS_ROOT = click.option(
    "--models-root",
    "models_roots",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with models and prompts to offer. Repeatable.",
)


@worker.command()
@click.argument("url")
@click.argument("token")
@click.option("--name", help="The node's name. Default: the host name.")
@MODELS_ROOT
def join(url: str, token: str, name: str | None, models_roots: tuple[Path, ...]) -> None:
    """Join the platform at URL with a join TOKEN (`-` reads it from standard input).

    The node's identity is saved in OPPO_HOME/worker. Joining again renews it.
    """
    click.echo(f"Joined {url} as {_join(url, token, name, models_roots)}. Start it with: oppo worker run")


@worker.command()
@click.option("--keep-attempts", is_flag=True, help="Keep running attempts alive when this process stops (service restarts).")
@click.option("--url", envvar="OPPO_PLATFORM_URL", help="Join this platform first, unless this machine has already joined one.")
@click.option("--token", envvar="OPPO_JOIN_TOKEN", help="Join token for --join; preferably set as OPPO_JOIN_TOKEN.")
@click.option("--name", envvar="OPPO_NODE_NAME", help="Node name for --join. Default: the host name.")
@MODELS_ROOT
def run(keep_attempts: bool, url: str | None, token: str | None, name: str | None, models_roots: tuple[Path, ...]) -> None:
    """Run the worker agent of this node."""
    from worker.folders import WorkerFolder

    folder = WorkerFolder.from_environment()
    identity = folder.identity()
    if identity is None:
        if not url or not token:
            raise Refusal("This machine has not joined a platform yet. Run: oppo worker join URL TOKEN")
        _join(url, token, name, models_roots)
    elif models_roots:
        folder.save_identity(identity.model_copy(update={"models_roots": [root.resolve() for root in models_roots]}))
    arguments = ["--keep-attempts"] if keep_attempts else []
    os.execv(sys.executable, [sys.executable, "-m", "worker", "agent", *arguments])  # noqa: S606


def _join(url: str, token: str, name: str | None, models_roots: tuple[Path, ...]) -> str:
    """Join and return the node's name. Raises Failure with the platform's reason."""
    from worker.folders import WorkerFolder
    from worker.join import join_platform
    from worker.platform_api import RefusedError, UnacceptableError, Unreachable

    # After the imports: `oppo up` starts this command early, and gives it the token once the platform responds.
    secret = sys.stdin.read().strip() if token == "-" else token  # noqa: S105 - the dash, not a password
    if not secret:
        raise Refusal("There is no join token on standard input.")
    try:
        return join_platform(WorkerFolder.from_environment(), url, secret, list(models_roots), name).name
    except Unreachable as error:
        raise Failure(f"The platform at {url} does not respond: {error}") from error
    except RefusedError as error:
        raise Failure(f"The platform rejected the token: {error}. Request a new one; join tokens expire.") from error
    except UnacceptableError as error:
        raise Failure(f"The platform and this worker are not compatible: {error}") from error

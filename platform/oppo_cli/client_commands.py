"""The platform from a terminal or a script, over the notebook client (docs/client.md): `oppo login`, `submit`, `runs`, …"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from oppo_cli.home import Failure, Refusal

if TYPE_CHECKING:
    from oppo_client import Client, OppoError, Run

F = TypeVar("F", bound=Callable[..., Any])

HERE = "http://127.0.0.1:8000"
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contextmanager
def _in_words() -> Iterator[None]:
    """The client's errors become exit statuses: 2 when the platform refuses, 1 when it fails or is not there."""
    from oppo_client import OppoError

    try:
        yield
    except BrokenPipeError:  # who reads our output has had enough (`| head`), which is no failure to tell of
        raise
    except (OppoError, OSError) as error:
        raise (Refusal if _is_refusal(error) else Failure)(_plain(str(error))) from error


def _is_refusal(error: Exception) -> bool:
    """Whether another try would be answered the same."""
    from oppo_client import ApiError, ConfigError, NoCheckpoint, ServerFault, TooManyRequests

    return isinstance(error, ApiError | ConfigError | NoCheckpoint) and not isinstance(error, ServerFault | TooManyRequests)


def _connected(command: F) -> F:
    """Decorates a command that takes a client first."""

    @wraps(command)
    def run(**options: Any) -> Any:
        from oppo_client import Client

        with _in_words(), Client() as client:
            return command(client, **options)

    return run  # type: ignore[return-value]


@click.command()
@click.argument("url", required=False)
def login(url: str | None) -> None:
    """Keep the address of a platform and a token for it, for this user alone (~/.config/oppo/config.toml, mode 0600).

    The token is asked for, or read from standard input, so that it stands in no history. You make one on your team's page.
    """
    import os

    from oppo_client import Client, Config, Retries, config_path, save_config
    from oppo_client.config import check_token, check_url

    with _in_words():
        address = check_url(url or os.environ.get("OPPO_URL") or HERE, config_path())
        asked = sys.stdin.isatty()
        token = click.prompt(f"Token for {address}", hide_input=True) if asked else sys.stdin.readline()
        config = Config(address, check_token(token.strip(), config_path()))
        with Client(config.url, config.token, retries=Retries(most=1)) as client:  # somebody who may have mistyped waits
            me = client.me()
        place = save_config(config)
    teams = ", ".join(f"{team['name']} ({team['role']})" for team in me["teams"]) or "no team"
    click.echo(_plain(f"You are {me['user']} in {teams}. Saved to {place}."))


@click.command()
@click.argument("spec", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--project", help="Name or number; default: the first project of the token's team.")
@click.option("--set", "changes", multiple=True, metavar="PATH=VALUE", help="Override a setting, e.g. overlap.overcommit.max=8.")
@click.option("--watch", "follow", is_flag=True, help="Show progress; exit 1 unless the run succeeds.")
@as_json
@_connected
def submit(client: Client, spec: Path, project: str | None, changes: tuple[str, ...], follow: bool, as_json: bool) -> None:
    """Queue a run from the YAML file SPEC. Prints its number and address."""
    run = client.submit(spec, project=project, overrides=dict(map(_change, changes)))
    if as_json and not follow:
        click.echo(json.dumps(run.summary))
    elif not as_json:
        click.echo(f"run {run.id} is {run.state}: {run.url}")
    if follow:
        _watch(run, as_json)


def _change(text: str) -> tuple[str, Any]:
    """`path=value`; the value is JSON if it can be read as such, and text otherwise. Raises `BadParameter`."""
    path, found, value = text.partition("=")
    if not found or not path:
        raise click.BadParameter(f"{text!r} is not PATH=VALUE", param_hint="--set")
    try:
        return path, json.loads(value, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return path, value


def _finite(text: str) -> float:
    """Raises ValueError for what JSON has no word for: the platform says best what it wants there instead."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


@click.command()
@click.argument("filter", required=False, default="")
@click.option("--sort", default="", help="Sort by a column; with - in front for descending order, e.g. -reward.")
@click.option("--project", default="", help="Name or number.")
@click.option("--state", "states", multiple=True, help="Only these states. Repeatable.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Maximum number of runs.")
@as_json
@_connected
def runs(client: Client, filter: str, sort: str, project: str, states: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List runs, newest first, that match a FILTER such as 'state:running reward>0.5' (docs/runs.md)."""
    found = list(islice(client.runs(filter, sort, project=project, state=states), limit))
    if as_json:
        click.echo(json.dumps([run.summary for run in found]))
        return
    from oppo_client import Table
    from oppo_client.run_base import REWARD

    columns: dict[str, Callable[[Run], Any]] = {
        "run": lambda run: run.id,
        "name": lambda run: run.name,
        "state": lambda run: run.state,
        "step": lambda run: f"{run.step}/{run.total_steps}",
        "reward": lambda run: run.latest.get(REWARD),
        "bubble": lambda run: run.summary.get("bubble"),
        "project": lambda run: run.project,
        "user": lambda run: run.summary["user"],
    }
    click.echo(repr(Table({name: [of(run) for run in found] for name, of in columns.items()})) if found else "no runs")


@click.command()
@click.argument("run_id", metavar="RUN", type=int)
@as_json
@_connected
def watch(client: Client, run_id: int, as_json: bool) -> None:
    """Show the progress of RUN until it ends. With --json a summary a line. Exit 1 unless it succeeds."""
    _watch(client.get(run_id), as_json)


def _watch(run: Run, as_json: bool) -> None:
    if as_json:
        for told in run.changes():
            click.echo(json.dumps(told))
    else:
        run.watch()
    if run.state != "succeeded":
        raise Failure(_plain(f"Run {run.id} ended as {run.state}: {run.reason}"))


@click.command()
@click.argument("run_id", metavar="RUN", type=int)
@click.option("-f", "--follow", is_flag=True, help="Follow until the run ends.")
@click.option("-n", "--lines", type=click.IntRange(0), default=1000, show_default=True, help="Number of last lines.")
@click.option("--all", "whole", is_flag=True, help="All lines.")
@click.option("--stream", type=click.Choice(["stdout", "stderr", "supervisor", "platform"]), help="Only this stream.")
@click.option("--search", default="", help="Only lines that contain all these words.")
@as_json
@_connected
def logs(client: Client, run_id: int, lines: int, whole: bool, search: str, as_json: bool, **wanted: Any) -> None:
    """Print the log of RUN. With --json an object a line."""
    on_terminal = sys.stdout.isatty()
    for line in client.get(run_id).logs(tail=None if whole else lines, q=search, **wanted):
        if as_json:
            told = {"id": line.id, "attempt": line.attempt, "stream": line.stream, "text": line.text}
            click.echo(json.dumps({**told, "time": line.time.isoformat()}))
        else:
            click.echo(_plain(line.text) if on_terminal else line.text)


@click.command()
@click.argument("run_ids", metavar="RUN…", type=int, nargs=-1, required=True)
@as_json
@_connected
def cancel(client: Client, run_ids: tuple[int, ...], as_json: bool) -> None:
    """Cancel runs. One that has ended stays as it is; one that may not be cancelled does not keep the others."""
    found = [client.get(run_id) for run_id in run_ids]  # a number that is none is told before anything is cancelled
    refused = _cancel_each(found, (lambda run: None) if as_json else (lambda run: click.echo(run.line())))
    if as_json:
        click.echo(json.dumps([run.summary for run in found if run.id not in refused]))
    if refused:
        kind = Refusal if all(map(_is_refusal, refused.values())) else Failure
        raise kind(_plain("\n".join(f"Run {run_id} was not cancelled: {error}" for run_id, error in refused.items())))


def _cancel_each(found: list[Run], done: Callable[[Run], None]) -> dict[int, OppoError]:
    """Why which of the runs was not cancelled; `done` is told of each of the others at once.

    When the platform is gone the rest is not asked for: each would wait as long again for nothing.
    """
    from oppo_client import OppoError, Unreachable

    refused: dict[int, OppoError] = {}
    for place, run in enumerate(found):
        try:
            done(run.cancel())
        except Unreachable as error:
            return refused | {left.id: error for left in found[place:]}
        except OppoError as error:
            refused[run.id] = error
    return refused


@click.command()
@click.argument("run_ids", metavar="RUN…", type=int, nargs=-1, required=True)
@click.option("--target", type=float, help="Target reward; default: the first budget.target_reward.")
@click.option("--baseline", type=int, help="Baseline run; default: the pinned run, otherwise the first.")
@as_json
@_connected
def compare(client: Client, run_ids: tuple[int, ...], target: float | None, baseline: int | None, as_json: bool) -> None:
    """Compare runs: time to a target reward, speed-up, bubbles, and the settings that differ (docs/comparing.md)."""
    told = client.compare(run_ids, target_reward=target, baseline=baseline, max_points=8)
    if as_json:
        click.echo(json.dumps({name: value for name, value in told.data.items() if name not in ("series", "counted")}))
        return
    table = told.table(frame=False)
    # A row a figure: runs are few, and figures would not fit side by side.
    heads = [str(run) for run in table["run"]]
    rows = {name: values for name, values in table.items() if name != "run" and any(v not in (None, "") for v in values)}
    columns = {head: [values[i] for values in rows.values()] for i, head in enumerate(heads)}
    click.echo(repr(type(table)({"run": list(rows), **columns})))


@click.command()
@click.argument("run_id", metavar="RUN", type=int)
@click.option("--checkpoint", default="latest", show_default=True, help="Step or name of the checkpoint.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Parent folder for the download.")
@as_json
@_connected
def pull(client: Client, run_id: int, checkpoint: str, out: Path, as_json: bool) -> None:
    """Download a checkpoint of RUN, checked against its manifest. Goes on where an earlier call broke off."""
    which = int(checkpoint) if checkpoint.isdecimal() else checkpoint
    found = client.get(run_id).checkpoint(which)
    folder = found.download(out)
    click.echo(json.dumps({**found.data, "folder": str(folder)}) if as_json else str(folder))


def _plain(text: str) -> str:
    """Without control characters, which would move a terminal's cursor; lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)

"""Commands over the notebook client (docs/client.md): `oppo login`, `submit`, `runs`, `watch`, `logs`, …"""

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

DEFAULT_URL = "http://127.0.0.1:8000"
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise the client's errors as `Refusal` (exit status 2) or `Failure` (1)."""
    from oppo_client import OppoError

    try:
        yield
    except BrokenPipeError:  # the reader closed the pipe (`| head`)
        raise
    except (OppoError, OSError) as error:
        raise (Refusal if _is_refusal(error) else Failure)(_plain(str(error))) from error


def _is_refusal(error: Exception) -> bool:
    """Whether a retry would give the same error."""
    from oppo_client import ApiError, ConfigError, NoCheckpoint, ServerFault, TooManyRequests

    return isinstance(error, ApiError | ConfigError | NoCheckpoint) and not isinstance(error, ServerFault | TooManyRequests)


@contextmanager
def signed_in() -> Iterator[Client]:
    """A client of the platform that `oppo login` named; its errors become `Refusal` or `Failure`."""
    from oppo_client import Client

    with _translate_errors(), Client() as client:
        yield client


def _with_client(command: F) -> F:
    """Decorate a command whose first argument is a client."""

    @wraps(command)
    def run(**options: Any) -> Any:
        with signed_in() as client:
            return command(client, **options)

    return run  # type: ignore[return-value]


@click.command()
@click.argument("url", required=False)
def login(url: str | None) -> None:
    """Save the URL of a platform and a token for it in ~/.config/oppo/config.toml (mode 0600).

    The token is read from a prompt or from standard input, so the shell history does not contain it. Create one on your team's
    page.
    """
    import os

    from oppo_client import Client, Config, Retries, config_path, save_config
    from oppo_client.config import check_token, check_url

    with _translate_errors():
        address = check_url(url or os.environ.get("OPPO_URL") or DEFAULT_URL, config_path())
        interactive = sys.stdin.isatty()
        token = click.prompt(f"Token for {address}", hide_input=True) if interactive else sys.stdin.readline()
        config = Config(address, check_token(token.strip(), config_path()))
        with Client(config.url, config.token, retries=Retries(most=1)) as client:  # a mistyped URL fails soon
            me = client.me()
        path = save_config(config)
    teams = ", ".join(f"{team['name']} ({team['role']})" for team in me["teams"]) or "no team"
    click.echo(_plain(f"You are {me['user']} in {teams}. Saved to {path}."))


@click.command()
@click.argument("spec", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--project", help="Name or number; default: the first project of the token's team.")
@click.option("--set", "changes", multiple=True, metavar="PATH=VALUE", help="Override a setting, e.g. overlap.overcommit.max=8.")
@click.option("--watch", "follow", is_flag=True, help="Show progress; exit 1 unless the run succeeds.")
@as_json
@_with_client
def submit(client: Client, spec: Path, project: str | None, changes: tuple[str, ...], follow: bool, as_json: bool) -> None:
    """Queue a run from the YAML file SPEC. Prints its number and URL."""
    run = client.submit(spec, project=project, overrides=dict(map(_parse_change, changes)))
    if as_json and not follow:
        click.echo(json.dumps(run.summary))
    elif not as_json:
        click.echo(f"run {run.id} is {run.state}: {run.url}")
    if follow:
        _watch(run, as_json)


def _parse_change(text: str) -> tuple[str, Any]:
    """Parse `path=value`; the value is JSON, otherwise text. Raises `BadParameter`."""
    path, separator, value = text.partition("=")
    if not separator or not path:
        raise click.BadParameter(f"{text!r} is not PATH=VALUE", param_hint="--set")
    try:
        return path, json.loads(value, parse_constant=_parse_finite, parse_float=_parse_finite)
    except (ValueError, RecursionError):
        return path, value


def _parse_finite(text: str) -> float:
    """Raise ValueError for a non-finite number, which is then sent as text and rejected by the platform with the field's path."""
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
@_with_client
def runs(client: Client, filter: str, sort: str, project: str, states: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List runs, newest first, that match a FILTER such as 'state:running reward>0.5' (docs/runs.md)."""
    matches = list(islice(client.runs(filter, sort, project=project, state=states), limit))
    if as_json:
        click.echo(json.dumps([run.summary for run in matches]))
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
    click.echo(repr(Table({name: [value(run) for run in matches] for name, value in columns.items()})) if matches else "no runs")


@click.command()
@click.argument("run_id", metavar="RUN", type=int)
@as_json
@_with_client
def watch(client: Client, run_id: int, as_json: bool) -> None:
    """Show the progress of RUN until it ends. With --json one summary per line. Exit 1 unless it succeeds."""
    _watch(client.get(run_id), as_json)


def _watch(run: Run, as_json: bool) -> None:
    if as_json:
        for summary in run.changes():
            click.echo(json.dumps(summary))
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
@_with_client
def logs(client: Client, run_id: int, lines: int, whole: bool, search: str, as_json: bool, **filters: Any) -> None:
    """Print the log of RUN. With --json one object per line."""
    on_terminal = sys.stdout.isatty()
    for line in client.get(run_id).logs(tail=None if whole else lines, q=search, **filters):
        if as_json:
            fields = {"id": line.id, "attempt": line.attempt, "stream": line.stream, "text": line.text}
            click.echo(json.dumps({**fields, "time": line.time.isoformat()}))
        else:
            click.echo(_plain(line.text) if on_terminal else line.text)


@click.command()
@click.argument("run_ids", metavar="RUN…", type=int, nargs=-1, required=True)
@as_json
@_with_client
def cancel(client: Client, run_ids: tuple[int, ...], as_json: bool) -> None:
    """Cancel runs. An ended run is unchanged; an error for one run does not prevent the others."""
    runs = [client.get(run_id) for run_id in run_ids]  # an unknown number fails before anything is cancelled
    errors = _cancel_each(runs, (lambda run: None) if as_json else (lambda run: click.echo(run.line())))
    if as_json:
        click.echo(json.dumps([run.summary for run in runs if run.id not in errors]))
    if errors:
        kind = Refusal if all(map(_is_refusal, errors.values())) else Failure
        raise kind(_plain("\n".join(f"Run {run_id} was not cancelled: {error}" for run_id, error in errors.items())))


def _cancel_each(runs: list[Run], on_cancelled: Callable[[Run], None]) -> dict[int, OppoError]:
    """Cancel runs; returns the error of each that was not cancelled. Stops at the first `Unreachable`."""
    from oppo_client import OppoError, Unreachable

    errors: dict[int, OppoError] = {}
    for position, run in enumerate(runs):
        try:
            on_cancelled(run.cancel())
        except Unreachable as error:
            return errors | {rest.id: error for rest in runs[position:]}
        except OppoError as error:
            errors[run.id] = error
    return errors


@click.command()
@click.argument("run_ids", metavar="RUN…", type=int, nargs=-1, required=True)
@click.option("--target", type=float, help="Target reward; default: the first budget.target_reward.")
@click.option("--baseline", type=int, help="Baseline run; default: the pinned run, otherwise the first.")
@as_json
@_with_client
def compare(client: Client, run_ids: tuple[int, ...], target: float | None, baseline: int | None, as_json: bool) -> None:
    """Compare runs: time to a target reward, speed-up, bubbles, and the settings that differ (docs/comparing.md)."""
    comparison = client.compare(run_ids, target_reward=target, baseline=baseline, max_points=8)
    if as_json:
        click.echo(json.dumps({name: value for name, value in comparison.data.items() if name not in ("series", "counted")}))
        return
    table = comparison.table(frame=False)
    # Transposed, one column per run, to fit the terminal.
    heads = [str(run) for run in table["run"]]
    rows = {name: values for name, values in table.items() if name != "run" and any(v not in (None, "") for v in values)}
    columns = {head: [values[i] for values in rows.values()] for i, head in enumerate(heads)}
    click.echo(repr(type(table)({"run": list(rows), **columns})))


@click.command()
@click.argument("run_id", metavar="RUN", type=int)
@click.option("--checkpoint", default="latest", show_default=True, help="Step or name of the checkpoint.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Parent folder for the download.")
@as_json
@_with_client
def pull(client: Client, run_id: int, checkpoint: str, out: Path, as_json: bool) -> None:
    """Download a checkpoint of RUN and verify it against its manifest. Resumes a partial download."""
    selected = client.get(run_id).checkpoint(int(checkpoint) if checkpoint.isdecimal() else checkpoint)
    folder = selected.download(out)
    click.echo(json.dumps({**selected.data, "folder": str(folder)}) if as_json else str(folder))


def _plain(text: str) -> str:
    """Text without control characters, except newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)

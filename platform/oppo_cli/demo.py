"""`oppo demo`: start the platform, make the models of a task, train sequential PPO and OPPO, compare them, keep serving."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oppo_cli.examples import DEMO, EXAMPLES, prepare_command
from oppo_cli.home import Failure, Home
from oppo_cli.processes import last_lines, start_logged
from oppo_cli.stack import SetupResult, Stack
from oppo_cli.up import print_welcome
from oppo_contract.presets import example_text

if TYPE_CHECKING:
    from rich.console import Console

    from oppo_client import Client, Refused, Run

CATALOGUE_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 1.0
INTERRUPTED = 130


class Interrupted(Exception):
    """Ctrl-C was pressed."""


@click.command()
@click.option(
    "--model", type=click.Choice(list(DEMO)), default="letters", show_default=True,
    help="letters: our own small model, two minutes; smollm2: a published language model, 93 MB of download, ten minutes.",
)  # fmt: skip
@click.option("--exit", "leave", is_flag=True, help="Exit when both runs have ended: status 0 only if both succeeded.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures to this file.")
@click.option("--fresh", is_flag=True, help="Train the two runs again even if a trained pair exists.")
@click.option("--port", type=click.IntRange(1, 65535), help="HTTP port.")
def demo(model: str, leave: bool, json_file: Path | None, fresh: bool, port: int | None) -> None:
    """Train two PPO-RLHF runs on this machine, sequential PPO and OPPO, and compare them.

    Starts the whole platform with a small learning task. Data stays in OPPO_HOME (default: .oppo); a second demo starts in
    seconds and shows the existing pair. Ctrl-C stops every process.
    """
    from rich.console import Console

    console = Console(highlight=False)
    home = Home.from_environment()
    with home.locked(), Stack(home, port=port) as stack:
        preparation = _start_preparation(stack, model)
        console.print("Starting database, broker, web, scheduler and worker…")
        setup = stack.start()
        print_welcome(setup, stack.base_url)
        try:
            succeeded = _Demo(stack, setup, console, model).run(preparation, fresh=fresh, json_file=json_file)
        except Interrupted:
            console.print("Stopping…")
            raise SystemExit(INTERRUPTED if leave else 0) from None
        if leave:
            raise SystemExit(0 if succeeded else 1)
        console.print(f"\nStill serving at {stack.base_url}  (Ctrl-C stops everything)")
        stack.keep_alive()
        console.print("Stopping…")


def _start_preparation(stack: Stack, model: str) -> subprocess.Popen[bytes]:
    """Create the task's models while the servers start; existing models are reused."""
    log = stack.home.logs / "task.log"
    log.unlink(missing_ok=True)
    command, folder = prepare_command(model, stack.home.models)
    environ = dict(stack.environ)
    if folder is not None:
        environ["PYTHONPATH"] = str(folder)
    return start_logged(command, environ, stack.lifeline.fd, log)


class _Demo:
    def __init__(self, stack: Stack, setup: SetupResult, console: Console, model: str) -> None:
        from oppo_client import Client, Retries

        self.stack, self.setup, self.console = stack, setup, console
        # Without retries: `_watch` must keep restarting processes while web is down.
        self.client: Client = Client(stack.local_url(), setup.api_token, retries=Retries(most=0))
        self.model = model
        self.saved_pair = stack.home.path / ("demo.json" if model == "letters" else f"demo-{model}.json")

    def run(self, preparation: subprocess.Popen[bytes], *, fresh: bool, json_file: Path | None) -> bool:
        """Run the demo; returns whether both runs succeeded. Raises Interrupted, Failure."""
        self._wait_for_models(preparation)
        pair = None if fresh else self._last_pair()
        if pair is None:
            pair = self._submit_pair()
        else:
            self.console.print("Showing the existing pair; `--fresh` trains a new one.")
        runs = self._watch(pair)
        failed = [run for run in runs if run.state != "succeeded"]
        if not failed:
            self._print_comparison(runs, json_file)
        for run in failed:
            lines = "\n".join(run.summary.get("last_log_lines") or [])
            sys.stderr.write(f"{run.name} {run.state}: {run.summary.get('error') or run.reason}\n{lines}\n")
        self.console.print(f"Compare them at {self.stack.base_url}/compare?runs={pair[0]},{pair[1]}", soft_wrap=True)
        return not failed

    def _wait_for_models(self, preparation: subprocess.Popen[bytes]) -> None:
        log, shown = self.stack.home.logs / "task.log", ""
        while preparation.poll() is None:
            newest = last_lines(log).splitlines()[-1:] or [""]
            if newest[0] != shown:
                shown = newest[0]
                self.console.print(f"{EXAMPLES[self.model].folder}: {shown}")
            self._pause()
        if preparation.returncode != 0:
            raise Failure(f"The learning task could not be prepared.\n{last_lines(log)}")

    def _last_pair(self) -> list[int] | None:
        """The runs of an earlier demo, unless one failed or was deleted."""
        from oppo_client import NotFound

        if not self.saved_pair.exists():
            return None
        pair = [int(run_id) for run_id in json.loads(self.saved_pair.read_text())["runs"]]
        try:
            return pair if all(self.client.get(run_id).state not in ("failed", "cancelled") for run_id in pair) else None
        except NotFound:
            return None

    def _submit_pair(self) -> list[int]:
        pair = [self._submit(example_text(name), changes) for name, changes in DEMO[self.model]]
        self.saved_pair.write_text(json.dumps({"runs": pair}))
        return pair

    def _submit(self, yaml: str, changes: dict[str, str | int]) -> int:
        """Submit a run; retries until the worker is connected and has reported the new models."""
        from oppo_client import Refused

        deadline = time.monotonic() + CATALOGUE_TIMEOUT_S
        while True:
            try:
                return self.client.submit(yaml=yaml, project=self.setup.project, overrides=changes).id
            except Refused as error:
                if not is_transient(error) or time.monotonic() > deadline:
                    raise Failure(f"The platform rejected the demo's run: {error}") from error
            self._pause()

    def _watch(self, pair: list[int]) -> list[Run]:
        """Show progress until both runs have ended."""
        from oppo_cli.demo_screen import RunsScreen
        from oppo_client import ServerFault, Unreachable

        with RunsScreen(self.console) as screen:
            while True:
                try:
                    runs = [self.client.get(run_id) for run_id in pair]
                except (Unreachable, ServerFault):  # web is restarting, on the same port
                    self._pause()
                    continue
                screen.show([run.summary for run in runs])
                if all(run.ended for run in runs):
                    return runs
                self._pause()

    def _print_comparison(self, runs: list[Run], json_file: Path | None) -> None:
        from oppo_cli.demo_figures import bench_document, run_figures, table_rows
        from oppo_cli.demo_screen import print_table
        from oppo_contract.yaml_text import load_yaml

        spec = load_yaml(runs[1].spec_yaml())
        warmup = spec.overlap.max_age + 1 if spec.overlap.inter_step == "defer" else 1
        comparison = self.client.compare(runs).data
        sequential, oppo = (run_figures(comparison, run.id, _axis(run, "wall"), _axis(run, "tokens"), warmup) for run in runs)
        print_table(self.console, table_rows(sequential, oppo), warmup)
        if json_file is not None:
            settings = {"seed": spec.seed, "steps": spec.steps, "batch_size": spec.ppo.batch_size, "left_out_steps": warmup}
            json_file.write_text(json.dumps(bench_document(sequential, oppo, settings), indent=2) + "\n")

    def _pause(self) -> None:
        self.stack.keep_alive(POLL_INTERVAL_S)
        if self.stack.signals.stop_requested:
            raise Interrupted


def is_transient(error: Refused) -> bool:
    """Whether all problems are about workers, models or prompts, which a connected worker reports within a heartbeat."""
    paths = [problem.path for problem in error.errors]
    return bool(paths) and all(not path or path.startswith("models.") or path.endswith(".prompts") for path in paths)


def _axis(run: Run, x: str) -> dict[int, float]:
    """Step → position on the axis `x` (seconds, tokens), for every step with a reward."""
    from oppo_cli.train import REWARD

    table = run.metrics(REWARD, x, frame=False)
    return dict(zip(table["step"], table[x], strict=True))

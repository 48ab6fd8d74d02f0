"""`oppo demo`: the whole platform, two real runs through it, and the table that compares them.

bring the platform up → make the task's models → submit sequential PPO and OPPO → watch → compare → go on serving
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oppo_cli.examples import DEMO, example_text, prepare_command
from oppo_cli.home import Failure, Home
from oppo_cli.processes import last_lines, start_logged
from oppo_cli.stack import Prepared, Stack
from oppo_cli.up import print_welcome

if TYPE_CHECKING:
    from rich.console import Console

    from oppo_cli.demo_api import DemoApi

TASK = "letters"
CATALOGUE_WITHIN_S = 60.0
LOOK_EVERY_S = 1.0
ENDED = ("succeeded", "failed", "cancelled")
INTERRUPTED = 130


class Interrupted(Exception):
    """Ctrl-C."""


@click.command()
@click.option("--exit", "leave", is_flag=True, help="Exit when both runs have ended: status 0 only if both succeeded.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures to this file.")
@click.option("--fresh", is_flag=True, help="Train the two runs again even if a trained pair exists.")
@click.option("--port", type=click.IntRange(1, 65535), help="HTTP port.")
def demo(leave: bool, json_file: Path | None, fresh: bool, port: int | None) -> None:
    """Train two real PPO-RLHF runs on this machine, sequential PPO and OPPO, and compare them.

    Everything comes along: database, broker, pages, worker, a small learning task. Data stays in OPPO_HOME (default: .oppo);
    a second demo starts in seconds and shows the last pair. Ctrl-C stops every process.
    """
    from rich.console import Console

    console = Console(highlight=False)
    home = Home.from_environment()
    with home.locked(), Stack(home, port=port) as stack:
        making = _start_making(stack)
        console.print("Starting database, broker, web, scheduler and worker…")
        prepared = stack.start()
        stack.watch.catch_stop()
        print_welcome(prepared, stack.base_url)
        try:
            good = _Demo(stack, prepared, console).run(making, fresh=fresh, json_file=json_file)
        except Interrupted:
            console.print("Stopping…")
            raise SystemExit(INTERRUPTED if leave else 0) from None
        if leave:
            raise SystemExit(0 if good else 1)
        console.print(f"\nStill serving at {stack.base_url}  (Ctrl-C stops everything)")
        stack.keep_alive()
        console.print("Stopping…")


def _start_making(stack: Stack) -> subprocess.Popen[bytes]:
    """Make the task's models while the servers start; a finished set is left alone."""
    log = stack.home.logs / "task.log"
    log.unlink(missing_ok=True)
    command, folder = prepare_command(stack.home.models / TASK)
    environ = dict(stack.environ)
    if folder is not None:
        environ["PYTHONPATH"] = str(folder)
    return start_logged(command, environ, stack.lifeline.fd, log)


class _Demo:
    def __init__(self, stack: Stack, prepared: Prepared, console: Console) -> None:
        from oppo_cli.demo_api import DemoApi

        self.stack, self.prepared, self.console = stack, prepared, console
        self.api: DemoApi = DemoApi(stack.base_url_here(), prepared.api_token)
        self.kept = stack.home.path / "demo.json"

    def run(self, making: subprocess.Popen[bytes], *, fresh: bool, json_file: Path | None) -> bool:
        """The demo's steps; returns whether both runs succeeded. Raises Interrupted, Failure."""
        self._wait_for_task(making)
        pair = None if fresh else self._last_pair()
        if pair is None:
            pair = self._submit_pair()
        else:
            self.console.print("Showing the existing pair; `--fresh` trains a new one.")
        runs = self._watch(pair)
        good = all(run["state"] == "succeeded" for run in runs)
        if good:
            self._tell_figures(pair, json_file)
        for run in runs:
            if run["state"] != "succeeded":
                self._tell_failure(run)
        self.console.print(f"Compare them at {self.stack.base_url}/compare?runs={pair[0]},{pair[1]}", soft_wrap=True)
        return good

    def _wait_for_task(self, making: subprocess.Popen[bytes]) -> None:
        log, shown = self.stack.home.logs / "task.log", ""
        while making.poll() is None:
            newest = last_lines(log).splitlines()[-1:] or [""]
            if newest[0] != shown:
                shown = newest[0]
                self.console.print(f"Learning task: {shown}")
            self._pause()
        if making.returncode != 0:
            raise Failure(f"The learning task could not be prepared.\n{last_lines(log)}")

    def _last_pair(self) -> list[int] | None:
        """The runs of an earlier demo, unless one of them failed or is gone."""
        if not self.kept.exists():
            return None
        pair = [int(run_id) for run_id in json.loads(self.kept.read_text())["runs"]]
        runs = [self.api.run(run_id) for run_id in pair]
        return pair if all(run is not None and run["state"] not in ("failed", "cancelled") for run in runs) else None

    def _submit_pair(self) -> list[int]:
        pair = [self._submit(example_text(name)) for name in DEMO]
        self.kept.write_text(json.dumps({"runs": pair}))
        return pair

    def _submit(self, yaml: str) -> int:
        """Submit one run, as a user would; the worker may need a moment to report the new models."""
        deadline = time.monotonic() + CATALOGUE_WITHIN_S
        while True:
            run_id, complaints = self.api.submit(yaml, self.prepared.project)
            if run_id is not None:
                return run_id
            if time.monotonic() > deadline:
                raise Failure("The platform rejected the demo's run:\n" + "\n".join(complaints))
            self._pause()

    def _watch(self, pair: list[int]) -> list[dict[str, Any]]:
        """Show the runs until both have ended."""
        import httpx

        from oppo_cli.demo_screen import RunsScreen

        runs: list[dict[str, Any]] = []
        with RunsScreen(self.console) as screen:
            while True:
                try:
                    found = [self.api.run(run_id) for run_id in pair]
                except httpx.TransportError:  # web was killed; it comes back on the same port
                    self._pause()
                    continue
                runs = [run for run in found if run is not None]
                screen.show(runs)
                if all(run["state"] in ENDED for run in runs):
                    return runs
                self._pause()

    def _tell_figures(self, pair: list[int], json_file: Path | None) -> None:
        from oppo_cli.demo_figures import bench_document, run_figures, table_rows
        from oppo_cli.demo_screen import print_table
        from oppo_cli.train import REWARD
        from oppo_contract.yaml_text import load_yaml

        spec = load_yaml(example_text("oppo"))
        warm = spec.overlap.max_age + 1
        compared = self.api.compare(pair)
        sequential, oppo = (
            run_figures(compared, run_id, self.api.axis(run_id, REWARD, "wall"), self.api.axis(run_id, REWARD, "tokens"), warm)
            for run_id in pair
        )
        print_table(self.console, table_rows(sequential, oppo), warm)
        if json_file is not None:
            settings = {"seed": spec.seed, "steps": spec.steps, "batch_size": spec.ppo.batch_size, "left_out_steps": warm}
            json_file.write_text(json.dumps(bench_document(sequential, oppo, settings), indent=2) + "\n")

    def _tell_failure(self, run: dict[str, Any]) -> None:
        lines = "\n".join(run.get("last_log_lines") or [])
        sys.stderr.write(f"{run['name']} {run['state']}: {run.get('error') or run['reason']}\n{lines}\n")

    def _pause(self) -> None:
        self.stack.keep_alive(LOOK_EVERY_S)
        if self.stack.watch.stop_asked:
            raise Interrupted

"""`oppo train`: the engine without the platform."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psutil

from oppo_cli.home import Failure, Refusal
from oppo_cli.processes import last_lines
from oppo_cli.spec_commands import read_spec

if TYPE_CHECKING:
    from oppo_contract import RunSpec

REWARD = "critic/score/mean"
HELD_OUT = "eval/score/mean"
STEP_S = "timing_s/step"
POLL_INTERVAL_S = 0.5
LINE_INTERVAL_S = 5.0
ENGINE_REFUSED = 2


@click.command()
@click.argument("spec_file", metavar="SPEC.yaml", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for events and checkpoints.")
@click.option(
    "--root", "roots", multiple=True, type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Root folder of model and prompt ids. Repeatable.",
)  # fmt: skip
@click.option("--resume-from", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Checkpoint to resume from.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU cores for the engine. Default: all.")
def train(spec_file: Path, out: Path, roots: tuple[Path, ...], resume_from: Path | None, threads: int | None) -> None:
    """Train one run on this machine: progress on the terminal, events in DIR/events.jsonl, checkpoints in DIR/checkpoints.

    Ctrl-C stops after the current chunk with a checkpoint; a second one ends at once.
    """
    spec = read_spec(spec_file)
    events = out / "events.jsonl"
    if resume_from is None:
        if any((out / "checkpoints").glob("step-*")):
            raise Refusal(f"{out} already contains a run. Use --resume-from {out}/checkpoints/… to resume it, or another --out.")
        events.unlink(missing_ok=True)  # of a run that failed before its first checkpoint
    out.mkdir(parents=True, exist_ok=True)
    (out / "spec.json").write_text(spec.model_dump_json(indent=1))
    command = [sys.executable, "-m", "oppo_core", "--spec", str(out / "spec.json"), "--out", str(out), "--events", str(events)]
    for root in roots:
        command += ["--root", str(root)]
    if resume_from is not None:
        command += ["--resume-from", str(resume_from)]
    if threads is not None:
        command += ["--threads", str(threads)]
    if spec.resources.ranks > 1:
        command = _with_torchrun(command, spec)
    click.echo(f"{spec.name}: {spec.steps} steps. Starting the engine; events are in {out / 'events.jsonl'}.")
    code, finished = _run(command, spec, out)
    _print_end(code, finished, out)


def _with_torchrun(command: list[str], spec: RunSpec) -> list[str]:
    """Wrap the command in torchrun, one process per rank. Raises Refusal for several nodes."""
    from worker.rendezvous import torchrun

    if spec.resources.nodes > 1:
        raise Refusal("Runs on several nodes need the platform, or torchrun on each node (docs/interfaces.md).")
    return torchrun(command, spec.resources.ranks_per_node, None)


def _run(command: list[str], spec: RunSpec, out: Path) -> tuple[int, dict[str, Any] | None]:
    """Run the engine and show its progress; returns its exit status and its `finished` event."""
    from oppo_contract.lifeline import Lifeline, start_guarded

    finished: dict[str, Any] | None = None
    progress = progress_display(spec.steps)
    offset = (out / "events.jsonl").stat().st_size if (out / "events.jsonl").exists() else 0
    single = spec.resources.ranks == 1  # torchrun closes the lifeline for its ranks, which end with torchrun instead
    with Lifeline() as lifeline, (out / "engine.log").open("ab") as log, progress:
        environ = lifeline.environ() if single else None
        engine = start_guarded(command, lifeline.fd, grace_s=24 * 3600, env=environ, output=log, pass_lifeline=single)
        previous_handler = _forward_interrupts(engine, single)
        for event in follow(out / "events.jsonl", offset, engine):
            if event["kind"] == "step":
                progress.show(event["step"], event["metrics"])
            elif event["kind"] == "log":
                progress.print_log(event["lines"])
            elif event["kind"] == "finished":
                finished = event
        signal.signal(signal.SIGINT, previous_handler)
    return engine.wait(), finished


def follow(file: Path, offset: int, engine: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Events as they are appended, until the engine has ended and the file is read completely."""
    partial_line = b""
    while True:
        ended = engine.poll() is not None
        if file.exists():
            with file.open("rb") as content:
                content.seek(offset)
                block = content.read()
            offset += len(block)
            *lines, partial_line = (partial_line + block).split(b"\n")
            yield from (json.loads(line) for line in lines)
        if ended:
            return
        time.sleep(POLL_INTERVAL_S)


def _forward_interrupts(engine: subprocess.Popen[bytes], single: bool) -> Any:
    """Ctrl-C terminates the engine after its chunk; a second one kills it. Returns the previous handler."""
    count = 0

    def stop(_number: int, _frame: object) -> None:
        nonlocal count
        count += 1
        if count == 1:
            click.echo("Stopping after this chunk with a checkpoint. Press Ctrl-C again to end immediately.", err=True)
        # torchrun would wait at most 30 s for its ranks, and fail.
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [engine] if single else _rank_processes(engine) or [engine]:
                process.terminate() if count == 1 else process.kill()

    return signal.signal(signal.SIGINT, stop)


def _rank_processes(engine: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Processes started by torchrun, which is the guard's only child."""
    try:
        return [rank for launcher in psutil.Process(engine.pid).children() for rank in launcher.children()]
    except psutil.NoSuchProcess:
        return []


def _print_end(code: int, finished: dict[str, Any] | None, out: Path) -> None:
    if code == ENGINE_REFUSED:
        raise Refusal(f"The engine rejected the spec.\n{last_lines(out / 'engine.log')}")
    if finished is None or code != 0:
        reason = finished["reason"] if finished else f"The engine ended with status {code} without finishing."
        raise Failure(f"{reason}\n{last_lines(out / 'engine.log')}")
    checkpoints = sorted((out / "checkpoints").glob("step-*"))
    click.echo(f"{finished['outcome'].capitalize()} at step {finished['step']}: {finished['reason']}")
    click.echo(f"Events: {out / 'events.jsonl'}" + (f"\nCheckpoint: {checkpoints[-1]}" if checkpoints else ""))


def progress_display(total_steps: int) -> Bar | Lines:
    """A progress bar on a terminal, plain lines elsewhere."""
    return Bar(total_steps) if sys.stdout.isatty() else Lines(total_steps)


class Bar:
    """A rich progress bar with the reward."""

    def __init__(self, total_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), refresh_per_second=2,
        )  # fmt: skip
        self._held_out: float | None = None  # of the last evaluation
        self._task = self._progress.add_task("training", total=total_steps, metrics="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._progress.stop()

    def print_log(self, lines: list[str]) -> None:
        """Print log lines above the bar."""
        for line in lines:
            self._progress.console.print(line, markup=False, highlight=False)

    def show(self, step: int, metrics: dict[str, Any]) -> None:
        """Show a finished step."""
        self._held_out = metrics.get(HELD_OUT, self._held_out)
        self._progress.update(self._task, completed=step, metrics=step_text({HELD_OUT: self._held_out} | metrics))


class Lines:
    """A line every 5 s, and after each evaluation."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._next = 0.0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_error: object) -> None:
        return

    def print_log(self, lines: list[str]) -> None:
        """Print log lines."""
        for line in lines:
            click.echo(line)

    def show(self, step: int, metrics: dict[str, Any]) -> None:
        """Print a finished step, at most every 5 s unless it was evaluated."""
        if time.monotonic() < self._next and step < self._total and HELD_OUT not in metrics:
            return
        self._next = time.monotonic() + LINE_INTERVAL_S
        click.echo(f"step {step}/{self._total}  {step_text(metrics)}")


def step_text(metrics: dict[str, Any]) -> str:
    """A step's mean reward, its own seconds, and the mean held-out score if it was evaluated."""
    text = f"reward {reward_text(metrics.get(REWARD))}"
    if isinstance(seconds := metrics.get(STEP_S), float | int):
        text += f"  {seconds:.1f} s/step"
    return text + (f"  held out {reward_text(metrics[HELD_OUT])}" if metrics.get(HELD_OUT) is not None else "")


def reward_text(reward: object) -> str:
    """A reward with three digits; a dash without one."""
    return f"{reward:.3f}" if isinstance(reward, float | int) else "–"

"""The engine's command line (`python -m oppo_core`): parses options, trains a run, and reports how it ended."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from oppo_contract.events import LOCAL_RANK_SUFFIX
from oppo_contract.machine import raise_open_file_limit
from oppo_contract.model_folder import ModelFolderError
from oppo_contract.spec import RunSpec, load_spec, load_stored_spec
from oppo_contract.spec_errors import SpecError
from oppo_core.reporting.event_log import LOCAL_RANK_EVENTS, NODE_EVENTS, Journal
from oppo_core.trackers.manager import Trackers

if TYPE_CHECKING:
    from oppo_core.distributed.process_group import Ranks
    from oppo_core.engine.state import Engine

OK, FAILED, REFUSED = 0, 1, 2
PARENT_POLL_S = 0.1
TRACKERS = "oppo_core.trackers"  # in the command line of tracker processes


def main(arguments: list[str] | None = None) -> int:
    """Train one run; returns the exit status (docs/interfaces.md)."""
    options = _parser().parse_args(arguments)
    if not faulthandler.is_enabled():  # pytest enables its own
        faulthandler.enable(2)  # stderr; a crash in a library's native code leaves its stack in the run's log
    _exit_with_parent()
    raise_open_file_limit()
    try:
        spec = load_spec(json.loads(options.spec.read_text()))
    except (OSError, ValueError, SpecError) as error:  # ValueError: neither UTF-8 nor JSON
        print(f"{options.spec}: {error}", file=sys.stderr)
        return REFUSED
    journal = _journal(spec, options.events)
    try:
        return _run(spec, options, journal)
    finally:
        journal.close()


def _journal(spec: RunSpec, events: Path) -> Journal:
    """This process's event log: `events` for a node's local rank 0, a file beside it for other local ranks."""
    if spec.resources.ranks == 1 or os.environ.get("RANK") == "0":
        return Journal(events)
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if local_rank == "0":
        return Journal(events, NODE_EVENTS)
    return Journal(events.with_name(events.name + LOCAL_RANK_SUFFIX + local_rank), LOCAL_RANK_EVENTS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m oppo_core", description="Train one PPO-RLHF run.")
    parser.add_argument("--spec", type=Path, required=True, help="the run's RunSpec as JSON")
    parser.add_argument("--out", type=Path, required=True, help="artifact folder; checkpoints go below it")
    parser.add_argument("--events", type=Path, required=True, help="append-only file, one event a line")
    parser.add_argument("--root", type=Path, action="append", default=[], help="where model and prompt ids are looked up")
    parser.add_argument("--resume-from", type=Path, help="a checkpoint folder")
    parser.add_argument("--threads", type=int, help="cores to use; default: all")
    return parser


@dataclass(slots=True)
class Attempt:
    """The parts of a run that exist so far."""

    ranks: Ranks | None = None
    engine: Engine | None = None

    @property
    def step(self) -> int:
        return self.engine.progress.step if self.engine is not None else 0


def _run(spec: RunSpec, options: argparse.Namespace, journal: Journal) -> int:
    stop, trackers, attempt = _stop_on_signals(), Trackers(journal), Attempt()
    with ExitStack() as parts:
        try:
            outcome, reason, unconsumed = _train(attempt, spec, options, journal, trackers, parts, stop)
            parts.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the last event reports every failure, `sys.exit` in a rule too
            if attempt.ranks is not None:
                attempt.ranks.leave(f"{type(error).__name__}: {error}")
            trackers.close("failed", attempt.step)
            return _report_failure(error, attempt.step, journal)
    trackers.close(outcome, attempt.step)
    journal.write("finished", outcome=outcome, step=attempt.step, reason=reason, unconsumed=unconsumed)
    return OK


def _train(
    attempt: Attempt, spec: RunSpec, options: argparse.Namespace, journal: Journal, trackers: Trackers, parts: ExitStack,
    stop: threading.Event,
) -> tuple[str, str, int]:  # fmt: skip
    """Check, build, restore and train. Returns the outcome, its reason, and the number of unconsumed responses."""
    from oppo_core.checkpointing.atomic_dir import recover
    from oppo_core.checkpointing.save_restore import restore, verify
    from oppo_core.control.stop_conditions import ASKED_TO_STOP
    from oppo_core.engine.build import assemble
    from oppo_core.engine.preflight import require_preflight
    from oppo_core.engine.resolve_defaults import resolve_defaults
    from oppo_core.models.load_roles import describe_models
    from oppo_core.reporting.provenance import collect_provenance
    from oppo_core.train import train

    ranks = attempt.ranks = _join_ranks(spec)
    if ranks.first:
        recover(options.out / "checkpoints")
    ranks.any(False)  # barrier: other ranks read checkpoints only after recovery
    spec = _pin_hub_models(spec, options, ranks, journal)
    require_preflight(spec, options.root, options.out)
    if ranks.first:
        trackers.start(spec, options.out)
    resume = options.resume_from
    changes = verify(resume, spec, ranks) if resume is not None else []
    spec, chosen = resolve_defaults(spec, options.root, resume)
    journal.write("log", stream="stdout", lines=[*chosen, *describe_models(spec, options.root)])
    engine = attempt.engine = assemble(spec, options.root, options.out, journal, options.threads, resume, ranks)
    if ranks.first:
        try:
            engine.provenance = collect_provenance(spec, options.root, options.threads, engine.prompts.digest)
        except (OSError, ModelFolderError) as error:  # a record is no reason to end a run
            journal.write("log", stream="stderr", lines=[f"The run's provenance is not recorded: {error}"])
    for part in (engine.decoder, engine.scorers, engine.hardware):
        parts.callback(part.close)
    if resume is not None:
        restore(engine, resume, changes)
    reason = train(engine, stop.is_set)
    return "stopped" if reason == ASKED_TO_STOP else "succeeded", reason, engine.pool.unconsumed


def _pin_hub_models(spec: RunSpec, options: argparse.Namespace, ranks: Ranks, journal: Journal) -> RunSpec:
    """The spec with hub models pinned to commits, the same on all ranks, and on this disk. Raises ModelFolderError."""
    from oppo_contract.model_folder import hub_allowed
    from oppo_core.checkpointing.save_restore import read_intact_state
    from oppo_core.models.hub import pin_hub_models

    if not hub_allowed():
        return spec
    saved = None
    if options.resume_from is not None:
        saved = load_stored_spec(read_intact_state(options.resume_from)["spec"])

    def say(line: str) -> None:
        journal.write("log", stream="stdout", lines=[line])

    if ranks.first:
        spec = pin_hub_models(spec, options.root, saved, say)
    pinned = load_stored_spec(json.loads(ranks.all_gather(spec.model_dump_json().encode())[0]))
    return spec if ranks.first else pin_hub_models(pinned, options.root, None, say)


def _join_ranks(spec: RunSpec) -> Ranks:
    """Select this process's device and join the other ranks. Raises LayoutError and RankError."""
    import torch

    from oppo_core.distributed.process_group import join, rendezvous_from_env
    from oppo_core.engine.layout import require_equal_devices, select_device

    device, resources = select_device(spec), spec.resources
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rendezvous = rendezvous_from_env(resources.nodes, resources.ranks_per_node, resources.longest_silence_s)
    ranks = join(rendezvous, "engine", device)
    require_equal_devices(device, ranks)
    return ranks


def _stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set; training stops after the present chunk."""
    stop = threading.Event()

    def request_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, request_stop)
    return stop


def _report_failure(error: Exception | SystemExit, step: int, journal: Journal) -> int:
    """Write the reason to stderr and to the last event; with a traceback unless the error's message explains itself."""
    message = f"{type(error).__name__}: {error}{_oom_remedy(error)}"
    reason = message.encode("utf-8", "replace").decode()  # file names may contain surrogates
    if not isinstance(error, ImportError) and isinstance(error, _explained_errors()):
        print(reason, file=sys.stderr)
    else:
        traceback.print_exception(error)
    journal.write("finished", outcome="failed", step=step, reason=reason[:4000])
    return FAILED


def _oom_remedy(error: BaseException) -> str:
    """What to lower after an OOM that was not retried with smaller passes, as in decoding."""
    import torch

    from oppo_core.engine.preflight import MEMORY_REMEDY

    return f" Remedy: {MEMORY_REMEDY}" if isinstance(error, torch.OutOfMemoryError) else ""


def _explained_errors() -> tuple[type[Exception], ...]:
    """Errors whose message states the problem and a remedy."""
    from oppo_contract.model_folder import ModelFolderError
    from oppo_core.checkpointing.atomic_dir import CheckpointError, DiskFullError
    from oppo_core.distributed.process_group import RankError
    from oppo_core.engine.layout import LayoutError
    from oppo_core.engine.preflight import PreflightError
    from oppo_core.models.oom_retry import MemoryShortError
    from oppo_core.rewards.errors import RewardError
    from oppo_core.rollout.prompts import PromptError
    from oppo_core.scoring.process import ScorerError
    from oppo_core.training.optimizer import NonFiniteError
    from oppo_core.vllm.errors import VllmError

    return (
        LayoutError, ModelFolderError, PromptError, CheckpointError, DiskFullError, NonFiniteError, RewardError, ScorerError,
        PreflightError, RankError, MemoryShortError, VllmError, OSError,
    )  # fmt: skip


def _exit_with_parent() -> None:
    """Exit when the parent process has ended, which closes the inherited pipe `OPPO_LIFELINE_FD`.

    torchrun closes inherited pipes, so its children poll their parent's process id.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_exit_after, args=(os.getppid(),), name="torchrun", daemon=True).start()
        return
    number = os.environ.get("OPPO_LIFELINE_FD")
    if number is None:
        return

    def watch() -> None:
        while os.read(int(number), 1):
            pass
        _kill_children_and_exit()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _exit_after(parent: int) -> None:
    """Exit when process `parent` is no longer the parent."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    _kill_children_and_exit()


def _kill_children_and_exit() -> None:
    """Kill all descendants and exit: vLLM's engine process would keep GPU memory.

    Tracker processes are not killed. They notice that the engine has ended, and send the rest of the event log first.
    """
    try:
        import psutil

        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if TRACKERS not in child.cmdline():
                    descendants = child.children(recursive=True)
                    child.kill()
                    for process in descendants:
                        with suppress(psutil.Error):
                            process.kill()
    finally:
        os._exit(137)

"""The engine's command line: parse, assemble, train, and say how it ended."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from oppo_contract.events import LOCAL_RANK_SUFFIX
from oppo_contract.spec import RunSpec, load_spec
from oppo_contract.spec_errors import SpecError
from oppo_core.reporting.event_log import LOCAL_RANK_EVENTS, NODE_EVENTS, Journal
from oppo_core.trackers.manager import Trackers

if TYPE_CHECKING:
    from oppo_core.distributed.process_group import Ranks

OK, FAILED, REFUSED = 0, 1, 2
PARENT_EVERY_S = 0.1
TRACKERS = "oppo_core.trackers"  # how their processes are called


def main(arguments: list[str] | None = None) -> int:
    """Train one run; the exit status is explained in docs/interfaces.md."""
    options = _parser().parse_args(arguments)
    _end_with_lifeline()
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
    """Where this process tells what it does: the first one of its node in the file that it was given, others beside it."""
    if spec.resources.ranks == 1 or os.environ.get("RANK") == "0":
        return Journal(events)
    process = os.environ.get("LOCAL_RANK", "0")
    if process == "0":
        return Journal(events, NODE_EVENTS)
    return Journal(events.with_name(events.name + LOCAL_RANK_SUFFIX + process), LOCAL_RANK_EVENTS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m oppo_core", description="Train one PPO-RLHF run.")
    parser.add_argument("--spec", type=Path, required=True, help="the run's RunSpec as JSON")
    parser.add_argument("--out", type=Path, required=True, help="artifact folder; checkpoints go below it")
    parser.add_argument("--events", type=Path, required=True, help="append-only file, one event a line")
    parser.add_argument("--root", type=Path, action="append", default=[], help="where model and prompt ids are looked up")
    parser.add_argument("--resume-from", type=Path, help="a checkpoint folder")
    parser.add_argument("--threads", type=int, help="cores to use; default: all")
    return parser


def _run(spec: RunSpec, options: argparse.Namespace, journal: Journal) -> int:
    stop = _stop_when_asked()
    engine = None
    ranks = None
    trackers = Trackers(journal)
    with ExitStack() as running:
        # Whatever goes wrong, be it that a rule calls `sys.exit`, the run's owner must read it in the last event.
        try:
            from oppo_core.checkpointing.atomic_dir import recover
            from oppo_core.checkpointing.save_restore import restore, verify
            from oppo_core.control.stop_conditions import ASKED_TO_STOP
            from oppo_core.engine.build import assemble
            from oppo_core.engine.preflight import refuse_impossible
            from oppo_core.train import train

            ranks = _joined(spec)
            if ranks.first:
                recover(options.out / "checkpoints")
            ranks.any(False)  # nobody reads or writes there before it is tidy
            refuse_impossible(spec, options.root, options.out)
            if ranks.first:
                trackers.start(spec, options.out)
            resume = options.resume_from
            changes = verify(resume, spec) if resume is not None else []
            engine = assemble(spec, options.root, options.out, journal, options.threads, resume, ranks)
            running.callback(engine.decoder.close)
            running.callback(engine.scorers.close)
            running.callback(engine.hardware.close)
            if resume is not None:
                restore(engine, resume, changes)
            reason = train(engine, stop.is_set)
            unconsumed = int(ranks.total([engine.pool.unconsumed])[0])
            running.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - see above
            if ranks is not None:
                ranks.leave(f"{type(error).__name__}: {error}")
            step = engine.progress.step if engine is not None else 0
            trackers.close("failed", step)
            return _failed(error, step, journal)
    outcome = "stopped" if reason == ASKED_TO_STOP else "succeeded"
    trackers.close(outcome, engine.progress.step)
    journal.write("finished", outcome=outcome, step=engine.progress.step, reason=reason, unconsumed=unconsumed)
    return OK


def _joined(spec: RunSpec) -> Ranks:
    """The run's ranks, this process's device taken. Raises LayoutError and RankError."""
    from oppo_core.distributed.process_group import join, rendezvous_from_env
    from oppo_core.engine.layout import device_of, take_device

    device, wanted = device_of(spec), spec.resources
    take_device(device)
    return join(rendezvous_from_env(wanted.nodes, wanted.ranks_per_node, wanted.longest_silence_s), "engine", device)


def _stop_when_asked() -> threading.Event:
    """Set by SIGTERM and SIGINT: the chunk under way is finished first."""
    stop = threading.Event()

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    return stop


def _failed(error: Exception | SystemExit, step: int, journal: Journal) -> int:
    """Say why on stderr and in the last event; with a traceback when the cause is none that we name ourselves."""
    told = f"{type(error).__name__}: {error}{_remedy(error)}"
    reason = told.encode("utf-8", "replace").decode()  # names of files may be no text
    if not isinstance(error, ImportError) and isinstance(error, _named()):
        print(reason, file=sys.stderr)
    else:
        traceback.print_exception(error)
    journal.write("finished", outcome="failed", step=step, reason=reason[:4000])
    return FAILED


def _remedy(error: BaseException) -> str:
    """What to lower when memory ran out where no pass is made smaller, as in a round of decoding."""
    import torch

    from oppo_core.engine.preflight import SMALLER

    return f" Remedy: {SMALLER}" if isinstance(error, torch.OutOfMemoryError) else ""


def _named() -> tuple[type[Exception], ...]:
    """Errors whose message says what is wrong and what to do."""
    from oppo_contract.model_folder import ModelFolderError
    from oppo_core.checkpointing.atomic_dir import DiskFullError
    from oppo_core.checkpointing.save_restore import CheckpointError
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


def _end_with_lifeline() -> None:
    """End at once when the inherited pipe `OPPO_LIFELINE_FD` closes: whoever started us is gone.

    torchrun closes the pipes that we would inherit; below it we watch whether it is there.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_after, args=(os.getppid(),), name="torchrun", daemon=True).start()
        return
    number = os.environ.get("OPPO_LIFELINE_FD")
    if number is None:
        return

    def watch() -> None:
        while os.read(int(number), 1):
            pass
        _end_with_all_below()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _end_after(parent: int) -> None:
    """End at once when process `parent` is not our parent any more."""
    while os.getppid() == parent:
        time.sleep(PARENT_EVERY_S)
    _end_with_all_below()


def _end_with_all_below() -> None:
    """End at once, and with us what we have started: vLLM's engine holds a GPU's memory and does not look whether we are there.

    Trackers are spared. They do look, and send on what they have been told.
    """
    try:
        import psutil

        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has ended by itself
                if TRACKERS not in child.cmdline():
                    below = child.children(recursive=True)
                    child.kill()
                    for process in below:
                        with suppress(psutil.Error):
                            process.kill()
    finally:
        os._exit(137)

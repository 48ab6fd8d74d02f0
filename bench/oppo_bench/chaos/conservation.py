"""What must hold when the campaign is over: nothing lost, nothing doubled, nothing left behind."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from oppo_bench.chaos.faults import Target
from oppo_bench.chaos.processes import find
from oppo_bench.platform_stack import Running

REWARD = "critic/score/mean"
TOLERANCE = 1e-6  # of rewards in float64: a pause within a step reads caches anew
Curve = Mapping[int, float]


def curve(running: Running, run_id: int) -> Curve:
    """The stored reward of each step."""
    table = running.client.get(run_id).metrics(REWARD, frame=False)
    return dict(zip(table["step"], table[REWARD], strict=True))


def violations(running: Running, shapes: Mapping[int, str], undisturbed: Mapping[str, Curve], target: Target) -> Iterator[str]:
    """Every law that is broken, as a sentence.

    Args:
        shapes: of each run.
        undisturbed: the curves of the same specs without faults.
    """
    yield from _ends(shapes, target)
    for run_id, shape in shapes.items():
        yield from _differences(run_id, shape, curve(running, run_id), undisturbed[shape])
    yield from _held()
    yield from _left_behind(target)
    yield from _checkpoints(list(shapes))
    yield from _backups(target)


def _ends(shapes: Mapping[int, str], target: Target) -> Iterator[str]:
    """Every run has succeeded, and only engines that the campaign ended count as engines that died."""
    from oppo_platform.runs.models import Attempt, Run

    for run in Run.objects.filter(pk__in=list(shapes)).exclude(state="succeeded"):
        yield f"Run {run.pk} ({shapes[run.pk]}) is {run.state}: {run.reason}"
    attempts = Attempt.objects.filter(run_id__in=list(shapes))
    died = attempts.filter(outcome__in=("engine_died", "failed"))
    if died.count() > target.engines_ended:
        words = "; ".join(f"run {a.run_id}: {a.reason}" for a in died[:5])
        yield f"{died.count()} attempts count as the engines' failures, and {target.engines_ended} engines were ended: {words}"


def _differences(run_id: int, shape: str, stored: Curve, expected: Curve) -> Iterator[str]:
    """The stored events are those of the same run without faults."""
    if sorted(stored) != sorted(expected):
        missing, more = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
        yield f"Run {run_id} ({shape}) lacks steps {missing} and has {more} besides"
        return
    off = [step for step, value in stored.items() if not math.isclose(value, expected[step], rel_tol=0, abs_tol=TOLERANCE)]
    if off:
        first = min(off)
        yield f"Run {run_id} ({shape}) trained something else from step {first}: {stored[first]} instead of {expected[first]}"


def _held() -> Iterator[str]:
    from oppo_platform.cluster.models import Device, DeviceState
    from oppo_platform.runs.models import Allocation

    held = Allocation.objects.filter(released_at__isnull=True).count()
    if held:
        yield f"{held} devices are still held"
    for device in Device.objects.exclude(state=DeviceState.READY).select_related("node"):
        yield f"Device {device.index} of {device.node.name} is {device.state}"


def _left_behind(target: Target) -> Iterator[str]:
    for kind in ("engine", "supervisor"):
        for process in find(kind, target.home):
            yield f"The {kind} {process.pid} still runs"
    for folder in target.home.glob("**/worker/attempts/*"):
        yield f"{folder} is left"


def _checkpoints(runs: list[int]) -> Iterator[str]:
    """The newest registered checkpoint of each run is on disk, and every one on disk is whole."""
    from oppo_platform.runs.attempts import latest_checkpoint
    from oppo_platform.runs.checkpoints import files_readable, local_folder
    from oppo_platform.runs.models import Checkpoint, Run

    newest = {saved.pk for run in Run.objects.filter(pk__in=runs) if (saved := latest_checkpoint(run)) is not None}
    for row in Checkpoint.objects.filter(run_id__in=runs):
        if files_readable(row) == "here":
            yield from _damage(local_folder(row), row.manifest_sha256)
        elif row.pk in newest:
            yield f"The newest checkpoint of run {row.run_id}, {row.url}, is not on disk"


def _damage(folder: Path, manifest_sha256: str) -> Iterator[str]:
    manifest = (folder / "manifest.json").read_bytes()
    if hashlib.sha256(manifest).hexdigest() != manifest_sha256:
        yield f"{folder} has another manifest than the registered one"
    for name, entry in json.loads(manifest).items():
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            yield f"{folder / name} is damaged"


def _backups(target: Target) -> Iterator[str]:
    """A backup is intact, or failed and left no file."""
    from oppo_cli.processes import oppo_command

    for number, process in enumerate(target.backups):
        file, status = target.home / f"backup-{number}.tar", process.wait()
        if status and file.exists():
            yield f"{file} exists although its backup failed"
        if status == 0:
            checked = subprocess.run(oppo_command("restore", str(file), "--check"), capture_output=True, text=True, check=False)
            if checked.returncode:
                yield f"{file} is not intact: {checked.stderr.strip()[-300:]}"

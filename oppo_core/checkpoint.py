"""Checkpoints: a folder that is complete or not there, from which a run goes on exactly as if it had never stopped.

Weights and optimizer states are safetensors, the rest is JSON. Caches are not saved: after every checkpoint the scorers are
told everything again, in interrupted and uninterrupted runs alike, so that both compute the same from there on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from oppo_contract.spec import RunSpec
from oppo_core.control import ChunkState, OvercommitState
from oppo_core.engine import Engine, Progress
from oppo_core.metrics import Cohorts
from oppo_core.ppo.shaping import ScoreMoments
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.support import load_supports, save_supports

FORMAT = 2
# What a resumed run may change: how long it goes on and what it writes, not what it computes.
MAY_DIFFER = {"name", "steps", "budget", "checkpoints", "logging"}
SEQUENCE_FIELDS = (
    "sequence_id",
    "prompt_index",
    "response",
    "behaviour_logprobs",
    "token_versions",
    "age",
    "cohort",
    "finished",
    "ended_by_eos",
    "stopped",
    "kept_version",
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed, with the reason."""


def save(engine: Engine) -> int:
    """Write `checkpoints/step-…`, tell of it, delete older ones beyond `checkpoints.keep`; returns the step."""
    step = engine.progress.step
    folder = engine.out / "checkpoints" / f"step-{step:08d}"
    draft = folder.with_name(f".{folder.name}.draft")
    with engine.trace.span("actor", "checkpoint"):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        engine.scorers.start_save(str(draft))
        engine.actor.save(draft, engine.model_source, engine.codec.eos, engine.codec.pad)
        save_supports(engine.pool.sequences, draft)
        engine.decoder.save(draft)
        (draft / "state.json").write_text(json.dumps(_state(engine)))
        engine.scorers.wait_save()
        engine.handover.forget_all()
        digest, size = _seal(draft)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(draft, folder)
        told = str(folder.relative_to(engine.out))
        engine.journal.write("checkpoint", step=step, folder=told, manifest_sha256=digest, bytes=size)
        for old in sorted(folder.parent.glob("step-*"))[: -engine.spec.checkpoints.keep]:
            shutil.rmtree(old)
    return step


def restore(engine: Engine, folder: Path) -> None:
    """Take back everything but the critic, which its process has loaded itself. `verify` has accepted the folder."""
    state = json.loads((folder / "state.json").read_text())
    if state["prompts_sha256"] != engine.prompts.digest:
        raise CheckpointError(
            f"{engine.spec.data.prompts} does not hold the prompts that the checkpoint was made with (or the actor's tokenizer"
            " reads them otherwise); bring the file back, or start a new run from the checkpoint's actor"
        )
    engine.actor.load(folder)
    engine.progress = Progress(**state["progress"])
    engine.overcommit = OvercommitState(**state["overcommit"])
    engine.chunk = ChunkState(**state["chunk"] | {"measured": {int(k): v for k, v in state["chunk"]["measured"].items()}})
    engine.cohorts = Cohorts(**_with_int_keys(state["cohorts"]))
    engine.moments = ScoreMoments(**state["score_moments"])
    engine.prompts.drawn = state["prompts_drawn"]
    engine.pool.started = state["sequences_started"]
    engine.pool.sequences = [_sequence(row, engine) for row in state["pool"]]
    engine.pool.queue = [_sequence(row, engine) for row in state["queue"]]
    load_supports(engine.pool.sequences, folder)
    engine.decoder.load(folder, engine.pool.sequences)


def verify(folder: Path, spec: RunSpec) -> None:
    """Check a checkpoint before anything is loaded from it.

    Raises:
        CheckpointError: incomplete, damaged, of another format, or of a spec that computes something else.
    """
    try:
        manifest: dict[str, dict[str, Any]] = json.loads((folder / "manifest.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no manifest.json: it is not a complete checkpoint") from None
    except ValueError:
        raise CheckpointError(f"{folder / 'manifest.json'} is damaged; resume from another checkpoint") from None
    for name, entry in manifest.items():
        path = folder / name
        if not path.is_file() or _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path} is missing or damaged; resume from another checkpoint")
    state = json.loads((folder / "state.json").read_text())
    if state["format"] != FORMAT:
        raise CheckpointError(f"{folder} has format {state['format']}; this engine reads {FORMAT}")
    _refuse_changes(RunSpec.model_validate(state["spec"]), spec)


def _state(engine: Engine) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "spec": engine.spec.model_dump(mode="json"),
        "progress": asdict(engine.progress),
        "overcommit": asdict(engine.overcommit),
        "chunk": asdict(engine.chunk),
        "cohorts": asdict(engine.cohorts),
        "score_moments": asdict(engine.moments),
        "prompts_drawn": engine.prompts.drawn,
        "prompts_sha256": engine.prompts.digest,
        "sequences_started": engine.pool.started,
        "pool": [_row(s) for s in engine.pool.sequences],
        "queue": [_row(s) for s in engine.pool.queue],
    }


def _row(sequence: Sequence) -> dict[str, Any]:
    return {name: getattr(sequence, name) for name in SEQUENCE_FIELDS}


def _sequence(row: dict[str, Any], engine: Engine) -> Sequence:
    return Sequence(prompt=engine.prompts.prompts[row["prompt_index"]].astype(np.int64), **row)


def _with_int_keys(cohorts: dict[str, Any]) -> dict[str, Any]:
    # JSON has text keys only.
    return cohorts | {name: {int(k): v for k, v in cohorts[name].items()} for name in ("started", "finished")}


def _refuse_changes(saved: RunSpec, asked: RunSpec) -> None:
    before, after = saved.model_dump(mode="json"), asked.model_dump(mode="json")
    changed = [key for key in before if before[key] != after[key] and key not in MAY_DIFFER]
    if saved.steps != asked.steps and {saved.ppo.schedule, saved.ppo.critic_schedule} != {"constant"}:
        raise CheckpointError(
            f"steps is {asked.steps} instead of {saved.steps}, and with it every learning rate of a falling ppo.schedule changes;"
            f" keep {saved.steps}, or start a new run from the checkpoint's actor"
        )
    if changed:
        raise CheckpointError(
            f"the checkpoint was made with another {', '.join(changed)}; only {', '.join(sorted(MAY_DIFFER))} may change"
        )


def _seal(draft: Path) -> tuple[str, int]:
    """Write the manifest; returns its digest and the size of all files in bytes."""
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    manifest = {str(path.relative_to(draft)): {"sha256": _sha256(path), "bytes": path.stat().st_size} for path in files}
    (draft / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return _sha256(draft / "manifest.json"), sum(entry["bytes"] for entry in manifest.values())  # type: ignore[misc]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Checkpoints: a folder that is complete or not there, from which a run goes on as if it had never stopped.

Weights and optimizer states are safetensors, the rest is JSON. No checkpoint holds the scorers' caches: after each one they are
handed every sequence again, from its first token. A checkpoint on schedule does so in uninterrupted runs too, so both compute the
same bits from there on. A run that is stopped elsewhere, also in the middle of a step, keeps tokens, log-probs and versions. When
it goes on it reads the tokens again, and it ends with results that are equal up to rounding.

Several ranks write one checkpoint together, in a folder that all of them see: the first rank what is the same on all, and each
what is its own (`Ranks.home`). The first publishes it when all have written. Another number of ranks deals that out anew
(`oppo_core/checkpointing/reshard.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from oppo_contract.spec import RunSpec, load_stored_spec
from oppo_core.checkpointing import resume_changes
from oppo_core.checkpointing.atomic_dir import MANIFEST, draft_of, heal, publish, sha256, sync_files
from oppo_core.checkpointing.reshard import STATE, load_cohorts, load_rank_state, rank_dirs, read_state
from oppo_core.checkpointing.resume_changes import Change
from oppo_core.checkpointing.retention import checkpoints_to_prune, delete
from oppo_core.control.controllers import ChunkState, OvercommitState
from oppo_core.control.run_score import RunScore, best_rule
from oppo_core.distributed.process_group import rank_dir
from oppo_core.engine.state import Engine, Progress
from oppo_core.engine.step_report import record_shrunk_passes
from oppo_core.models.oom_retry import limit
from oppo_core.ppo.reward_shaping import ScoreMoments
from oppo_core.rollout.prompt_sharding import PromptSharding
from oppo_core.rollout.sampling_support import load_supports, save_supports
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.step_state import StepState

# Formats 4 and 5 held caches of a step that was cut, too. They are not looked at: a resumed step reads its tokens anew.
FORMAT, READS = 6, (4, 5, 6)
# A shared folder that one node makes is seen by the others a little later.
SEEN_WITHIN_S, LOOKS_EVERY_S = 10.0, 0.02
MICRO_BATCH = "ppo.micro_batch_tokens"
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
    "stale_logprobs",
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed, with the reason."""


def save_when_due(engine: Engine) -> None:
    """Write a checkpoint when a step, its evaluation included, has just ended after which one is due."""
    if (
        engine.batch is None
        and not engine.run_score.unfinished
        and engine.progress.step % engine.spec.checkpoints.every_steps == 0
    ):
        save(engine)


def save_at_the_end(engine: Engine, window_start: float) -> None:
    """Write the run's last checkpoint, unless this state is saved; `window_start`: of the step under way."""
    if engine.batch is not None:
        engine.progress.elapsed_s += engine.clock() - window_start
    if engine.ranks.any(engine.saved != name_of(engine)):
        save(engine)


def save(engine: Engine) -> None:
    """Write `checkpoints/step-…`. The scorers' caches are dropped, here and in a run that resumes.

    In the middle of a step, or of an evaluation, the engine ends after it.

    Raises:
        DiskFullError: there is no room for it; the checkpoints before are untouched.
    """

    def fill(draft: Path) -> None:
        engine.scorers.start_save(str(draft))
        _write(engine, draft)
        engine.scorers.wait_save()
        engine.deltas.forget_all()

    _keep(engine, fill)


def restore(engine: Engine, folder: Path, changed: Rows[Change] = ()) -> None:
    """Take back everything but the critic, which its process has loaded itself. `verify` has accepted the folder."""
    own = load_rank_state(folder, engine.ranks)
    state = own.state
    if state["prompts_sha256"] != engine.prompts.digest:
        raise CheckpointError(
            f"{engine.spec.data.prompts} does not hold the prompts that the checkpoint was made with (or the actor's tokenizer"
            " reads them otherwise); bring the file back, or start a new run from the checkpoint's actor"
        )
    engine.actor.load(folder)
    passes, engine.progress = engine.progress.passes, Progress(**state["progress"])
    _limit_passes(engine, passes, changed)
    engine.overcommit = OvercommitState(**state["overcommit"])
    engine.chunk = ChunkState(**state["chunk"] | {"measured": {int(k): v for k, v in state["chunk"]["measured"].items()}})
    engine.cohorts = load_cohorts(state)
    engine.moments = ScoreMoments(**state["score_moments"])
    engine.run_score = _run_score(state)
    engine.pool.sharding = PromptSharding(**state["turns"])
    engine.pool.sequences = [_sequence(row, engine) for row in state["pool"]]
    engine.pool.queue = [_sequence(row, engine) for row in state["queue"]]
    load_supports(engine.pool.sequences, own.homes)
    if not own.dealt:
        engine.decoder.load(own.homes[0], engine.pool.sequences)
    engine.changes = list(changed)
    resume_changes.apply(changed, engine)
    if state["suspended"] is not None:
        _take_back(engine, state["suspended"])
    engine.saved = name_of(engine)


def _run_score(state: dict[str, Any]) -> RunScore:
    """The run's scores; before format 6 they had other names."""
    if "run_score" in state:
        return RunScore(**state["run_score"])
    older = dict(state["standing"])
    return RunScore(pending_metrics=older.pop("untold"), last_metrics=older.pop("told"), **older)


def _limit_passes(engine: Engine, passes: dict[str, int], changed: Rows[Change]) -> None:
    """Passes stay as small as memory has made them, before the checkpoint or since (`passes`).

    When the spec names another size, that counts instead of the checkpoint's.
    """
    saved = {} if any(change.path == MICRO_BATCH for change in changed) else engine.progress.passes
    engine.progress.passes = saved | {name: min(tokens, saved.get(name, tokens)) for name, tokens in passes.items()}
    limit(engine.budgets, engine.progress.passes)
    engine.scorers.limit(engine.progress.passes)


def _take_back(engine: Engine, suspended: dict[str, Any]) -> None:
    """Take back the step and the evaluation that a stop has cut off. Their caches are filled when they go on."""
    half, evaluation = suspended["batch"], suspended.get("evaluation")
    if half is not None:
        sequences = {s.sequence_id: s for s in engine.pool.sequences}
        counts = half.get("decoder", half)  # where formats 4 and 5 have them
        engine.pool.overcommit = half["overcommit"]
        engine.batch = StepState(
            [sequences[i] for i in half["finishers"]], half["chunk"],
            interrupted=True, rounds=counts["rounds"], decoded=counts["decoded"],
        )  # fmt: skip
    same = not any(resume_changes.matches_rule(change.path, "evaluation") for change in engine.changes)
    if evaluation is not None and engine.evaluator is not None and same:
        engine.evaluator.resume(evaluation["answers"])


def verify(folder: Path, spec: RunSpec) -> list[Change]:
    """Check a checkpoint before anything is loaded from it; returns what `spec` has changed since.

    Raises:
        CheckpointError: incomplete, damaged, of another format, or of a spec that has changed what cannot be changed.
    """
    intact(folder)
    state = read_state(folder)
    if state["format"] not in READS:
        raise CheckpointError(f"{folder} has format {state['format']}; this engine reads {READS[0]} to {READS[-1]}")
    changed = resume_changes.diff_specs(load_stored_spec(state["spec"]), spec)
    in_flight = sum(len(read_state(home)["pool"]) for home in rank_dirs(folder))
    refused = resume_changes.refusals(changed, in_flight, spec)
    if refused:
        raise CheckpointError("the checkpoint cannot be resumed with this spec: " + "; ".join(refused))
    return changed


def intact(folder: Path) -> None:
    """Check that a checkpoint is whole, file by file.

    Raises:
        CheckpointError: incomplete or damaged.
    """
    heal(folder)
    try:
        manifest: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a complete checkpoint") from None
    except ValueError:
        raise CheckpointError(f"{folder / MANIFEST} is damaged; resume from another checkpoint") from None
    for name, entry in manifest.items():
        path = folder / name
        if not path.is_file() or sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path} is missing or damaged; resume from another checkpoint")


def _keep(engine: Engine, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a draft, publish it, tell of it, and delete what need not be kept any more."""
    folder = engine.out / "checkpoints" / name_of(engine)
    with engine.trace.span("actor", "checkpoint"):
        score = (
            engine.run_score.score_checkpoint(folder.name, engine.progress.step, engine.spec) if engine.batch is None else None
        )
        if engine.ranks.first:
            _publish(engine, folder, fill, score)
        else:
            _add_to_draft(engine, fill)
        engine.saved = folder.name


def _publish(engine: Engine, folder: Path, fill: Callable[[Path], None], score: float | None) -> None:
    keep = engine.spec.checkpoints
    with draft_of(folder, needed_bytes(engine)) as draft:
        engine.ranks.all_gather(str(draft).encode())
        fill(draft)
        engine.ranks.any(False)  # all have written their parts
        seal = publish(draft, folder)
    engine.journal.write(
        "checkpoint", step=engine.progress.step, folder=str(folder.relative_to(engine.out)),
        manifest_sha256=seal.digest, bytes=seal.size, score=score, chunk=engine.batch.chunk if engine.batch else 0,
    )  # fmt: skip
    names = [path.name for path in folder.parent.glob("step-*")]
    delete(engine.out, checkpoints_to_prune(names, folder.name, engine.run_score.checkpoints, keep.keep, keep.keep_best))


def _add_to_draft(engine: Engine, fill: Callable[[Path], None]) -> None:
    """Write this rank's part into the first one's draft.

    Raises:
        CheckpointError: it cannot be seen from here.
    """
    draft = Path(engine.ranks.all_gather(b"")[0].decode())
    until = time.monotonic() + SEEN_WITHIN_S
    while not draft.is_dir() and time.monotonic() < until:
        time.sleep(LOOKS_EVERY_S)
    if not draft.is_dir():
        raise CheckpointError(
            f"rank {engine.ranks.rank} does not see {draft}, which rank 0 has made: the ranks' --out must lie on a path that all"
            " nodes share (OPPO_ARTIFACT_ROOT)"
        )
    home = rank_dir(draft, engine.ranks.rank)
    home.mkdir()
    fill(home)
    sync_files(home)
    engine.ranks.any(False)


def needed_bytes(engine: Engine) -> int:
    """What a checkpoint takes on disk, as far as it can be known before it is written."""
    return engine.actor.saves_bytes + engine.scorers.saves_bytes


def name_of(engine: Engine) -> str:
    """The checkpoint's folder, so that names sort by age."""
    half = f"-chunk-{engine.batch.chunk:06d}" if engine.batch is not None else ""
    return f"step-{engine.progress.step:08d}{half}"


def _write(engine: Engine, draft: Path) -> None:
    engine.actor.save(draft, engine.model_source, engine.codec.eos, engine.codec.pad)
    record_shrunk_passes(engine)
    save_supports(engine.pool.sequences, draft)
    engine.decoder.save(draft)
    state = _state(engine) | {"suspended": _suspended(engine)}
    (draft / STATE).write_text(json.dumps(state))


def _suspended(engine: Engine) -> dict[str, Any] | None:
    """The step and the evaluation under way, besides the sequences themselves; None where there is neither."""
    half, answers = None, engine.evaluator.saved() if engine.evaluator is not None else None
    if (batch := engine.batch) is not None:
        counts = batch if batch.interrupted else engine.decoder
        half = {
            "finishers": [s.sequence_id for s in batch.finishers], "chunk": batch.chunk, "overcommit": engine.pool.overcommit,
            "rounds": counts.rounds, "decoded": counts.decoded,
        }  # fmt: skip
    if half is None and answers is None:
        return None
    return {"batch": half, "evaluation": {"answers": answers} if answers is not None else None}


def _state(engine: Engine) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "spec": engine.spec.model_dump(mode="json"),
        "progress": asdict(engine.progress),
        "overcommit": asdict(engine.overcommit),
        "chunk": asdict(engine.chunk),
        "cohorts": asdict(engine.cohorts),
        "score_moments": asdict(engine.moments),
        "run_score": asdict(engine.run_score),
        "best_rule": best_rule(engine.spec),
        "prompts_sha256": engine.prompts.digest,
        "turns": asdict(engine.pool.sharding),
        "pool": [_row(s) for s in engine.pool.sequences],
        "queue": [_row(s) for s in engine.pool.queue],
    }


def _row(sequence: Sequence) -> dict[str, Any]:
    return {name: getattr(sequence, name) for name in SEQUENCE_FIELDS}


def _sequence(row: dict[str, Any], engine: Engine) -> Sequence:
    return Sequence(prompt=engine.prompts.prompts[row["prompt_index"]].astype(np.int64), **row)

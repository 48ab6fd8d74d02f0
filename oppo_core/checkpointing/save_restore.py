"""Saves and restores checkpoints: atomic folders of safetensors (weights, optimizer states) and JSON (the rest).

Scorer caches are not saved: after each checkpoint the scorers get every sequence again from its first token, without a resume
too, so resuming from a scheduled checkpoint is bit-equal. A checkpoint within a step keeps tokens, log-probs and versions; the
resumed run prefills them again and is equal up to rounding.

All ranks write one checkpoint in a shared folder: each one its shards of sharded tensors, and each but rank 0 its own sequences
in a subfolder (`rank_dir`). Rank 0 publishes it (`checkpointing/publication.py`). Any number of ranks can resume it
(`checkpointing/rank_states.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Rows
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from oppo_contract.chosen_defaults import keep_chosen
from oppo_contract.resume_rules import Change, diff_specs, matches_rule
from oppo_contract.spec import RunSpec, load_stored_spec
from oppo_core.checkpointing.atomic_dir import MANIFEST, CheckpointError, Entries, restore_former, sha256
from oppo_core.checkpointing.publication import add_to_draft, publish_draft
from oppo_core.checkpointing.rank_states import STATE, load_cohorts, load_state, rank_dirs, read_state
from oppo_core.checkpointing.resume_changes import apply_changes, find_refusals
from oppo_core.control.controllers import ChunkState, OvercommitState
from oppo_core.control.run_score import RunScore, best_rule
from oppo_core.distributed.process_group import SINGLE, Ranks
from oppo_core.engine.state import Engine, Progress
from oppo_core.engine.step_report import record_shrunk_passes
from oppo_core.models.oom_retry import limit
from oppo_core.models.tensor_files import shards_of, shards_of_rank
from oppo_core.ppo.reward_shaping import ScoreMoments
from oppo_core.rollout.placement import place_at_resume
from oppo_core.rollout.sampling_support import load_supports, save_supports
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.step_state import StepState
from oppo_estimate.memory import decode_slots

# Formats 4 and 5 also have KV caches of an interrupted step, which are ignored. Before 7 each rank had a pool of its own, and
# before 8 no tensor was in shards.
FORMAT, READABLE = 8, (4, 5, 6, 7, 8)
MICRO_BATCH = "ppo.micro_batch_tokens"
SEQUENCE_FIELDS = (
    "sequence_id", "prompt_index", "response", "behaviour_logprobs", "token_versions", "age", "cohort", "finished",
    "ended_by_eos", "stopped", "kept_version", "stale_logprobs",
)  # fmt: skip


def save_when_due(engine: Engine) -> None:
    """Write a checkpoint every `checkpoints.every_steps` steps, after the step and its evaluation are complete."""
    if engine.writer.ready:
        with engine.trace.span("actor", "checkpoint"):
            engine.writer.wait()
    complete = engine.batch is None and not engine.run_score.unfinished
    if complete and engine.progress.step % engine.spec.checkpoints.every_steps == 0:
        save(engine)


def save_at_the_end(engine: Engine, window_start: float) -> None:
    """Write the run's last checkpoint unless the present state is saved already. `window_start`: start of an unfinished step."""
    if engine.batch is not None:
        engine.progress.elapsed_s += engine.clock() - window_start
    if engine.ranks.any(engine.saved != checkpoint_name(engine)):
        save(engine)


def save(engine: Engine) -> None:
    """Write `checkpoints/step-…`, publish it, report it, and delete checkpoints that need not be retained.

    With a `BackgroundWriter` it is published later, at the end of a step. The checkpoint before it is published first.

    Raises:
        DiskFullError: too little space; earlier checkpoints are untouched.
        CheckpointError: this rank does not see rank 0's draft.
    """
    folder, score = engine.out / "checkpoints" / checkpoint_name(engine), None
    with engine.trace.span("actor", "checkpoint"):
        engine.writer.wait()
        if engine.batch is None:
            score = engine.run_score.score_checkpoint(folder.name, engine.progress.step, engine.spec)
        if engine.ranks.first:
            publish_draft(engine, folder, score, _write)
        else:
            add_to_draft(engine, _write)
        engine.saved = folder.name


def restore(engine: Engine, folder: Path, changes: Rows[Change] = ()) -> None:
    """Restore everything from a verified checkpoint except the critic, which its own process has loaded."""
    saved_state = load_state(folder, engine.ranks)
    state = saved_state.state
    if state["prompts_sha256"] != engine.prompts.digest:
        raise CheckpointError(
            f"{engine.spec.data.prompts} does not hold the prompts that the checkpoint was made with (or the actor's tokenizer"
            " encodes them differently); restore the file, or start a new run from the checkpoint's actor"
        )
    engine.actor.load(folder)
    passes, engine.progress = engine.progress.passes, Progress(**state["progress"])
    _limit_passes(engine, passes, changes)
    saved = state["overcommit"]  # checkpoints of earlier versions have more fields
    engine.overcommit = OvercommitState(saved["overcommit"], saved["means"], saved.get("steps_without_rise", 0))
    engine.chunk = ChunkState(**state["chunk"] | {"measured": {int(k): v for k, v in state["chunk"]["measured"].items()}})
    engine.cohorts = load_cohorts(state)
    engine.moments = ScoreMoments(**state["score_moments"])
    engine.run_score = run_score(state)
    pool, ranks = engine.pool, engine.ranks
    pool.next_group, pool.skipped = state["prompts"]["next_group"], state["prompts"]["skipped"]
    pool.sequences, pool.queue = ([_sequence(row, engine) for row in state[kind]] for kind in ("pool", "queue"))
    load_supports(pool.sequences, saved_state.folders)
    if ranks.world > 1:
        place_at_resume(pool.sequences, ranks, decode_slots(engine.spec), engine.spec.rollout.max_new_tokens)
    if saved_state.own is not None:
        engine.decoder.load(saved_state.own, pool.sequences)
    engine.changes = list(changes)
    apply_changes(changes, engine)
    if state["suspended"] is not None:
        _restore_interrupted(engine, state["suspended"])
    engine.saved = checkpoint_name(engine)


def run_score(state: dict[str, Any]) -> RunScore:
    """The run's scores, which have other names before format 6."""
    if "run_score" in state:
        return RunScore(**state["run_score"])
    older = dict(state["standing"])
    return RunScore(pending_metrics=older.pop("untold"), last_metrics=older.pop("told"), **older)


def _limit_passes(engine: Engine, passes: dict[str, int], changes: Rows[Change]) -> None:
    """Apply the pass budgets that OOM retries reduced before the checkpoint, and since (`passes`).

    If `ppo.micro_batch_tokens` was changed, the checkpoint's budgets are ignored.
    """
    saved = {} if any(change.path == MICRO_BATCH for change in changes) else engine.progress.passes
    engine.progress.passes = saved | {name: min(tokens, saved.get(name, tokens)) for name, tokens in passes.items()}
    limit(engine.budgets, engine.progress.passes)
    engine.scorers.limit(engine.progress.passes)


def _restore_interrupted(engine: Engine, suspended: dict[str, Any]) -> None:
    """Restore an interrupted step and an interrupted evaluation; their KV caches are prefilled when they continue."""
    half, evaluation = suspended["batch"], suspended.get("evaluation")
    if half is not None:
        sequences = {s.sequence_id: s for s in engine.pool.sequences}
        counts = half.get("decoder", half)  # formats 4 and 5
        engine.pool.overcommit = half["overcommit"]
        engine.batch = StepState(
            [sequences[i] for i in half["finishers"]], half["chunk"],
            interrupted=True, rounds=counts["rounds"], decoded=counts["decoded"],
            replacements=half.get("replacements", 0), replaced=half.get("replaced", 0),
        )  # fmt: skip
    unchanged = not any(matches_rule(change.path, "evaluation") for change in engine.changes)
    if evaluation is not None and engine.evaluator is not None and unchanged:
        engine.evaluator.resume(evaluation["answers"])


def verify(folder: Path, spec: RunSpec, ranks: Ranks = SINGLE) -> list[Change]:
    """Check a checkpoint before anything is loaded from it; returns the changes between its spec and `spec`. All ranks call it.

    Raises:
        CheckpointError: incomplete, damaged, of an unsupported format, or the spec has a change that is not allowed.
    """
    check_intact(folder, ranks)
    state = read_state(folder)
    if state["format"] not in READABLE:
        raise CheckpointError(f"{folder} has format {state['format']}; this engine reads {READABLE[0]} to {READABLE[-1]}")
    _check_ranks(folder)
    _check_shards(folder)
    saved = load_stored_spec(state["spec"])
    changes = diff_specs(saved, keep_chosen(spec, saved))
    in_flight = sum(len(read_state(path)["pool"]) for path in rank_dirs(folder))
    if refusals := find_refusals(changes, in_flight, spec):
        raise CheckpointError("the checkpoint cannot be resumed with this spec: " + "; ".join(refusals))
    return changes


def check_intact(folder: Path, ranks: Ranks = SINGLE) -> None:
    """Check all files of a checkpoint against its manifest. All ranks call it, and each reads about as many bytes.

    Raises:
        CheckpointError: incomplete or damaged.
    """
    manifest = _manifest(folder)
    with ranks.raise_on_all(CheckpointError):
        for name in _shares(manifest, ranks.world)[ranks.rank]:
            _check_file(folder, name, manifest)


def _shares(manifest: Entries, world: int) -> list[list[str]]:
    """The files divided among the ranks: the largest first, to the rank with the fewest bytes."""
    shares: list[list[str]] = [[] for _ in range(world)]
    sizes = [0] * world
    for name, entry in sorted(manifest.items(), key=lambda item: -int(item[1]["bytes"])):
        rank = sizes.index(min(sizes))
        shares[rank].append(name)
        sizes[rank] += int(entry["bytes"])
    return shares


def read_intact_state(folder: Path) -> dict[str, Any]:
    """The first rank's `state.json`, without a check of the other files.

    Raises:
        CheckpointError: there is no manifest, or `state.json` is missing or damaged.
    """
    _check_file(folder, STATE, _manifest(folder))
    return read_state(folder)


def _manifest(folder: Path) -> Entries:
    restore_former(folder)
    try:
        manifest: Entries = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a complete checkpoint") from None
    except ValueError:
        raise CheckpointError(f"{folder / MANIFEST} is damaged; resume from another checkpoint") from None
    return manifest


def _check_file(folder: Path, name: str, manifest: Entries) -> None:
    path = folder / name
    if name not in manifest or not path.is_file() or sha256(path) != manifest[name]["sha256"]:
        raise CheckpointError(f"{path} is missing or damaged; resume from another checkpoint")


def _check_ranks(folder: Path) -> None:
    """Raises CheckpointError unless all ranks that wrote the checkpoint have written their state."""
    folders = rank_dirs(folder)
    for file in (path / STATE for path in folders):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, although {len(folders)} ranks wrote it; resume from another checkpoint")


def _check_shards(folder: Path) -> None:
    """Raises CheckpointError unless all ranks that wrote the checkpoint have written shards, or none has."""
    world = len(rank_dirs(folder))
    folders = [shards_of(file) for file in folder.glob("*.safetensors") if shards_of(file).is_dir()]
    for rank in range(world):
        present = {file.parent for file in shards_of_rank(folder, rank)}
        if missing := sorted(path for path in folders if path not in present):
            raise CheckpointError(
                f"{missing[0]} has no shards of rank {rank}, although {world} ranks wrote it; resume from another checkpoint"
            )


def checkpoint_name(engine: Engine) -> str:
    """The folder name of a checkpoint of the present state; names sort by age."""
    half = f"-chunk-{engine.batch.chunk:06d}" if engine.batch is not None else ""
    return f"step-{engine.progress.step:08d}{half}"


def _write(engine: Engine, draft: Path, own: Path) -> None:
    """Write the trainers' tensors into `draft` and this rank's state into `own`; drop the scorers' caches, as a resume does."""
    engine.scorers.start_save(str(draft))
    engine.actor.save(draft, engine.model_source, engine.codec.eos, engine.codec.pad)
    record_shrunk_passes(engine)
    save_supports(engine.local(engine.pool.sequences), own)
    engine.decoder.save(own)
    (own / STATE).write_text(json.dumps(_state(engine)))
    engine.scorers.wait_save()
    engine.deltas.forget_all()


def _interrupted(engine: Engine) -> dict[str, Any] | None:
    """The unfinished step and evaluation, without the sequences; None if there is neither."""
    half, answers = None, engine.evaluator.saved() if engine.evaluator is not None else None
    if (batch := engine.batch) is not None:
        counts = batch if batch.interrupted else engine.decoder
        half = {
            "finishers": [s.sequence_id for s in batch.finishers], "chunk": batch.chunk, "overcommit": engine.pool.overcommit,
            "rounds": counts.rounds, "decoded": counts.decoded,
            "replacements": batch.replacements, "replaced": batch.replaced,
        }  # fmt: skip
    if half is None and answers is None:
        return None
    return {"batch": half, "evaluation": {"answers": answers} if answers is not None else None}


def _state(engine: Engine) -> dict[str, Any]:
    """The state as this rank writes it: its own sequences; those without a rank, such as queued ones, are rank 0's."""

    def rows(sequences: Rows[Sequence]) -> list[dict[str, Any]]:
        own = [s for s in sequences if (s.rank or 0) == engine.ranks.rank]
        return [{name: getattr(s, name) for name in SEQUENCE_FIELDS} for s in own]

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
        "prompts": {"next_group": engine.pool.next_group, "skipped": engine.pool.skipped},
        "pool": rows(engine.pool.sequences),
        "queue": rows(engine.pool.queue),
        "suspended": _interrupted(engine),
    }


def _sequence(row: dict[str, Any], engine: Engine) -> Sequence:
    return Sequence(prompt=engine.prompts.prompts[row["prompt_index"]].astype(np.int64), **row)

"""A run goes on with another number of ranks: no answer is lost or trained twice, and every prompt is drawn once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from oppo_core.checkpointing.atomic_dir import MANIFEST, sha256
from oppo_core.checkpointing.rank_states import STATE, load_cohorts, merge_states, rank_dirs, read_state
from oppo_core.reporting.metrics import Cohorts
from tests.engine.distributed.test_process_group import DEFER, PLAIN, Rank, Tree, sound, trained_by, weights

OLD_SPEC = {"ppo": {"group_size": 2}, "overlap": {"inter_step": "defer"}}


def old_state(**more: Any) -> Tree:
    """What a rank wrote before format 7."""
    state = {"format": 6, "spec": OLD_SPEC, "pool": [], "queue": [], "suspended": None, "progress": {"step": 3}}
    return state | {"cohorts": asdict(Cohorts())} | more


def old_row(sequence_id: int, cohort: int, age: int = 0, **more: Any) -> Tree:
    return {"sequence_id": sequence_id, "prompt_index": 0, "cohort": cohort, "age": age, "response": [7, 7], **more}


def test_pools_of_ranks_before_format_7_become_one() -> None:
    """Two ranks in a half-done step; the second has started more groups and has run out of memory once."""
    cohorts = [Cohorts({2: 2}, {2: [5]}), Cohorts({2: 3, 3: 2}, {2: [4]}, newest_mean=3.5, newest=1)]
    first = old_state(
        pool=[old_row(4, 2), old_row(5, 2, finished=True)], turns={"rank": 0, "world": 2, "begun": 0, "owed": [], "taken": 2},
        cohorts=asdict(cohorts[0]), suspended={"batch": {"finishers": [5]}, "evaluation": None},
        progress={"step": 3, "passes": {"actor": 64, "scorers": 32}},
    )  # fmt: skip
    second = old_state(
        pool=[old_row(2, 1, age=2), old_row(10, 3)], turns={"rank": 1, "world": 2, "begun": 0, "owed": [], "taken": 3},
        cohorts=asdict(cohorts[1]), progress={"step": 3, "passes": {"actor": 16}},
    )  # fmt: skip
    merged = merge_states(json.loads(json.dumps([first, second])))
    assert [row["sequence_id"] for row in merged["pool"]] == [2, 4, 5, 10], "the oldest first"
    # The first rank has started groups 0 and 2, the second 1, 3 and 5.
    assert merged["prompts"] == {"next_group": 6, "skipped": [4]}
    assert merged["progress"] == {"step": 3, "passes": {"actor": 16, "scorers": 32}}
    assert merged["suspended"] is None
    whole = load_cohorts(json.loads(json.dumps(merged)))
    assert (whole.started, whole.finished) == ({2: 3, 3: 2}, {2: [4]}), "the first rank's cohort 2 was complete with 5's length"
    assert (whole.newest, whole.newest_mean) == (2, 3.5)


def test_numbers_owed_before_format_7_are_started_first() -> None:
    turns = [{"rank": rank, "world": 2, "begun": 6, "owed": owed, "taken": 1} for rank, owed in enumerate([[1, 4], [3]])]
    assert merge_states([old_state(turns=turn) for turn in turns])["prompts"] == {"next_group": 6, "skipped": [4]}


def test_format_4_has_only_the_number_of_started_responses() -> None:
    # Groups 0, 2, 4 and 1.
    states = [old_state(format=4, sequences_started=count) for count in (6, 2)]
    assert merge_states(states)["prompts"] == {"next_group": 5, "skipped": [3]}


def ranks(count: int, steps: int) -> Tree:
    """A run of so many steps on so many ranks."""
    return {"resources": {"kind": "cpu", "processes": count}, "steps": steps, "checkpoints": {"every_steps": 1, "keep": 99}}


def going_on(
    world: Any, out: Path, counts: list[int], *changes: Tree, each: int = 1, stop: Callable[..., bool] | None = None
) -> list[list[Rank]]:
    """Runs that take each other up, with so many ranks each and `each` more steps, from the newest checkpoint there is."""
    told: list[list[Rank]] = []
    resume = None
    for number, count in enumerate(counts, start=1):
        last = number == len(counts)
        more = {} if stop is None or last else {"stop_after": stop}
        spec = world.spec(*changes, ranks(count, each * number if stop is None else 99 if not last else each * number))
        told.append(sound(trained_by(world, spec, out, count, resume, inline=PLAIN not in changes, **more)))
        resume = max((out / "checkpoints").iterdir())
    return told


def test_one_and_three_ranks_resume_a_run_of_two_with_the_results_of_one(world: Any, tmp_path: Path) -> None:
    parts = going_on(world, tmp_path / "parts", [2, 1, 3, 2], PLAIN)
    (whole,) = sound(trained_by(world, world.spec(PLAIN, ranks(1, 4)), tmp_path / "whole", 1))
    metrics = [step for part in parts for step in part[0].metrics]
    assert len(metrics) == len(whole.metrics) == 4
    for ours, theirs in zip(metrics, whole.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-7, abs=1e-9, nan_ok=True)
    for rank in parts[-1]:
        for key, value in weights(whole).items():
            torch.testing.assert_close(weights(rank)[key], value, rtol=0, atol=1e-9)


def assert_as_one_rank(world: Any, out: Path, parts: list[list[Rank]], *changes: Tree) -> None:
    """The parts of a run trained the batches that a whole run on one rank trains, to the same weights."""
    batches = [batch for part in parts for batch in part[0].trained]
    (whole,) = sound(trained_by(world, world.spec(*changes, ranks(1, len(batches))), out, 1, inline=True))
    assert batches == whole.trained
    last, *_ = parts[-1]
    assert last.engine is not None
    assert whole.engine is not None
    for key, value in weights(whole).items():
        torch.testing.assert_close(weights(last)[key], value, rtol=0, atol=1e-9)
    for kind in ("sequences", "queue"):
        ours, theirs = ([s.sequence_id for s in getattr(rank.engine.pool, kind)] for rank in (last, whole) if rank.engine)
        assert ours == theirs
    assert last.engine.cohorts == whole.engine.cohorts


IN_FLIGHT: dict[str, Tree] = {
    "defer": {},
    "filters": {"rollout": {"top_k": 5}},
    "tail-batch": {"overlap": {"inter_step": "tail_batch"}},
}


@pytest.mark.parametrize("name", ["defer", "filters", pytest.param("tail-batch", marks=pytest.mark.full)])
def test_responses_in_flight_continue_on_other_ranks(world: Any, tmp_path: Path, name: str) -> None:
    changes = [DEFER, IN_FLIGHT[name]]
    parts = going_on(world, tmp_path / "parts", [2, 3, 1], *changes, each=2)
    assert_as_one_rank(world, tmp_path / "whole", parts, *changes)


def test_a_half_done_step_is_completed_by_other_ranks(world: Any, tmp_path: Path) -> None:
    def stop(rank: int, chunks: int) -> bool:
        return chunks >= 4

    parts = going_on(world, tmp_path / "parts", [2, 3, 1], DEFER, each=2, stop=stop)
    assert any("-chunk-" in folder.name for folder in (tmp_path / "parts" / "checkpoints").iterdir())
    assert_as_one_rank(world, tmp_path / "whole", parts, DEFER)


@pytest.mark.parametrize("count", [2, 1])
def test_a_checkpoint_of_two_ranks_before_format_7_is_resumed(world: Any, tmp_path: Path, count: int) -> None:
    parts = going_on(world, tmp_path / "parts", [2], DEFER, each=2)
    folder = max((tmp_path / "parts" / "checkpoints").iterdir())
    for rank, path in enumerate(rank_dirs(folder)):
        state = read_state(path)
        begun = state.pop("prompts")["next_group"]
        turns = {"rank": rank, "world": 2, "begun": begun, "owed": [], "taken": 0}
        cohorts = state["cohorts"] if rank == 0 else asdict(Cohorts())
        (path / STATE).write_text(json.dumps(state | {"format": 6, "turns": turns, "cohorts": cohorts}))
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    entries = {str(path.relative_to(folder)): {"sha256": sha256(path), "bytes": path.stat().st_size} for path in files}
    (folder / MANIFEST).write_text(json.dumps(entries))
    rest = trained_by(world, world.spec(DEFER, ranks(count, 4)), tmp_path / "rest", count, folder, inline=True)
    assert_as_one_rank(world, tmp_path / "whole", [*parts, sound(rest)], DEFER)

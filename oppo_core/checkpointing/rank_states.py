"""The state of a checkpoint from the files of all ranks that wrote it, for any number of ranks.

All ranks hold the same state except for their own sequences' tokens, reduced pass budgets and half-done evaluation. Each rank
writes its `state.json` with its own sequences. Every rank that resumes reads all of them and keeps the tokens of those that are
placed on it: with the same number of ranks its former ones, whose KV caches may be saved too.

Before format 7 each rank had a pool of its own, with its own prompts and cohorts. These are merged; a half-done step of several
ranks restarts with its sequences, finished ones included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oppo_contract.spec import load_stored_spec
from oppo_core.distributed.process_group import Ranks, rank_dir
from oppo_core.reporting.metrics import Cohorts
from oppo_core.rollout.sequence import Sequence

STATE = "state.json"
ONE_POOL_FORMAT = 7
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state of a checkpoint as one rank resumes it. Rows of `pool` have the `rank` that they stay on, if any.

    `folders`: of all ranks that wrote it; `own`: this rank's, None if another number of ranks wrote it.
    """

    state: State
    folders: list[Path]
    own: Path | None


def load_state(folder: Path, ranks: Ranks) -> SavedState:
    """The state of the checkpoint `folder` for this rank."""
    folders = rank_dirs(folder)
    states = [read_state(path) for path in folders]
    same = len(states) == ranks.world
    for rank, state in enumerate(states):
        for row in state["pool"]:
            row["rank"] = rank if same and ranks.world > 1 else None
    merged = merge_states(states)
    if same:
        merged["progress"] = states[ranks.rank]["progress"]
        if merged["format"] >= ONE_POOL_FORMAT:
            merged["suspended"] = states[ranks.rank]["suspended"]
    return SavedState(merged, folders, folders[ranks.rank] if same else None)


def rank_dirs(folder: Path) -> list[Path]:
    """The folders of the ranks that wrote the checkpoint `folder`."""
    world = load_stored_spec(read_state(folder)["spec"]).resources.ranks
    return [rank_dir(folder, rank) for rank in range(world)]


def read_state(folder: Path) -> State:
    """A rank's `state.json`."""
    state: State = json.loads((folder / STATE).read_text())
    return state


def load_cohorts(state: State) -> Cohorts:
    """The cohorts; restores the integer keys that JSON made strings."""
    saved = state["cohorts"]
    return Cohorts(**saved | {name: {int(k): v for k, v in saved[name].items()} for name in ("started", "finished")})


def merge_states(states: Rows[State]) -> State:
    """The states of all ranks of a checkpoint as one."""
    first = states[0]
    merged = first | {"progress": first["progress"] | {"passes": _smallest_passes(states)}}
    # The order of the pool: the oldest first.
    merged["pool"] = sorted((row for s in states for row in s["pool"]), key=lambda row: (-row["age"], row["sequence_id"]))
    if first["format"] >= ONE_POOL_FORMAT:
        if len(states) > 1 and first["suspended"] is not None:
            merged["suspended"] = first["suspended"] | {"evaluation": None}  # of the first rank's prompts only
        return merged
    merged["queue"] = sorted((row for s in states for row in s["queue"]), key=lambda row: int(row["sequence_id"]))
    merged["prompts"] = _merge_prompts(states)
    if len(states) > 1:
        merged |= {"cohorts": _merge_cohorts([_settled_cohorts(state) for state in states]), "suspended": None}
    return merged


def _smallest_passes(states: Rows[State]) -> dict[str, int]:
    """The smallest pass budget per name that OOM retries on any rank have left."""
    smallest: dict[str, int] = {}
    for state in states:
        for name, tokens in state["progress"].get("passes", {}).items():
            smallest[name] = min(tokens, smallest.get(name, tokens))
    return smallest


def _merge_prompts(states: Rows[State]) -> State:
    """The next group's number, and lower ones that no rank has started, from the `turns` of each rank before format 7.

    A rank took the numbers `owed` first, then every `world`-th from `begun` + its rank; `taken` counts both. Format 4 has only
    the number of responses started.
    """
    world, turns = len(states), list[State]()
    for rank, state in enumerate(states):
        group_size = int(state["spec"]["ppo"]["group_size"])
        counted = {"rank": rank, "world": world, "begun": 0, "owed": [], "taken": state.get("sequences_started", 0) // group_size}
        turns.append(state.get("turns", counted))
    coming = [turn["begun"] + max(0, turn["taken"] - len(turn["owed"])) * world + turn["rank"] for turn in turns]
    following = max([turns[0]["begun"], *(number - world + 1 for number in coming)])
    skipped = [
        number
        for turn, first in zip(turns, coming, strict=True)
        for number in (*turn["owed"][turn["taken"] :], *range(first, following, world))
    ]
    return {"next_group": following, "skipped": sorted(skipped)}


def _settled_cohorts(state: State) -> Cohorts:
    """A rank's cohorts including the responses finished in a half-done step."""
    cohorts = load_cohorts(state)
    half = (state["suspended"] or {}).get("batch")
    if half is not None and state["spec"]["overlap"]["inter_step"] != "tail_batch":
        finished = [row for row in state["pool"] if row["sequence_id"] in set(half["finishers"])]
        cohorts.finish(Sequence(prompt=np.empty(0, dtype=np.int64), **row) for row in finished)
    return cohorts


def _merge_cohorts(cohorts: Rows[Cohorts]) -> State:
    newest = max(cohorts, key=lambda each: each.newest)
    merged = Cohorts(newest=newest.newest, newest_mean=newest.newest_mean)
    for each in cohorts:
        for cohort, count in each.started.items():
            merged.begin(cohort, count)
        for cohort, lengths in each.finished.items():
            merged.finished.setdefault(cohort, []).extend(lengths)
    return {"started": merged.started, "finished": merged.finished, "newest_mean": merged.newest_mean, "newest": merged.newest}

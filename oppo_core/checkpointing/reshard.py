"""Per-rank state of a checkpoint, and its redistribution (resharding) to a different number of ranks.

Weights, moments, controllers and statistics are equal on all ranks. A rank's own state is its responses in flight or queued, its
prompt sharding and the lengths of its cohorts. With the same number of ranks each loads its own. Otherwise every rank reads all
states and computes the same redistribution: each response goes to one rank with its tokens, ordered by age, so that no rank gets
more overdue responses than its share of the batch. KV caches are rebuilt. Tokens that vLLM sampled ahead are sampled again. A
half-done step restarts with its responses, finished ones included.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oppo_contract.spec import load_stored_spec
from oppo_core.distributed.process_group import Ranks, rank_dir
from oppo_core.reporting.metrics import Cohorts
from oppo_core.rollout import prompt_sharding
from oppo_core.rollout.prompt_sharding import PromptSharding
from oppo_core.rollout.sequence import Sequence

STATE = "state.json"
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank's part of a checkpoint: its state, and the folders with the files of its responses.

    `resharded`: another number of ranks wrote the checkpoint.
    """

    state: State
    folders: list[Path]
    resharded: bool = False


def load_rank_state(folder: Path, ranks: Ranks) -> RankState:
    """This rank's part of the checkpoint `folder`."""
    folders = rank_dirs(folder)
    if len(folders) == ranks.world:
        state = read_state(folders[ranks.rank])
        sharding = load_sharding(state, ranks.rank, ranks.world)
        return RankState(state | {"turns": asdict(sharding)}, [folders[ranks.rank]])
    states = [read_state(path) for path in folders]
    return RankState(reshard_states(states, ranks.world)[ranks.rank], folders, resharded=True)


def rank_dirs(folder: Path) -> list[Path]:
    """The folders of the ranks that wrote the checkpoint `folder`."""
    world = load_stored_spec(read_state(folder)["spec"]).resources.ranks
    return [rank_dir(folder, rank) for rank in range(world)]


def read_state(folder: Path) -> State:
    """A rank's `state.json`."""
    state: State = json.loads((folder / STATE).read_text())
    return state


def load_sharding(state: State, rank: int, world: int) -> PromptSharding:
    """A rank's prompt sharding; format 4 has only the number of responses begun."""
    if "turns" in state:
        return PromptSharding(**state["turns"])
    return PromptSharding(rank, world, taken=state["sequences_started"] // _group_size(state))


def load_cohorts(state: State) -> Cohorts:
    """A rank's cohorts; restores the integer keys that JSON made strings."""
    saved = state["cohorts"]
    return Cohorts(**saved | {name: {int(k): v for k, v in saved[name].items()} for name in ("started", "finished")})


def reshard_states(states: Rows[State], world: int) -> list[State]:
    """Redistribute the states of all ranks of a checkpoint to `world` ranks; ordered by rank."""
    first = states[0]
    pools, queues = (
        _deal((row for state in states for row in state[kind]), _group_size(first), world) for kind in ("pool", "queue")
    )
    shardings = [load_sharding(state, rank, len(states)) for rank, state in enumerate(states)]
    turns = prompt_sharding.reshard_prompts(shardings, world)
    waiting = [
        Counter(row["cohort"] for row in [*pool, *queue] if not _length_counted(row, first))
        for pool, queue in zip(pools, queues, strict=True)
    ]
    cohorts = _split_cohorts(_merge_cohorts([_settled_cohorts(state) for state in states]), waiting)
    return [
        first
        | {"pool": pools[rank], "queue": queues[rank], "turns": asdict(turns[rank]), "cohorts": asdict(cohorts[rank])}
        | {"progress": first["progress"] | {"passes": _smallest_passes(states)}, "suspended": None}
        for rank in range(world)
    ]


def _deal(rows: Iterable[State], group_size: int, world: int) -> list[list[State]]:
    """Deal whole groups round-robin, oldest first."""
    groups: dict[int, list[State]] = {}
    for row in sorted(rows, key=lambda row: (-row["age"], row["sequence_id"])):
        groups.setdefault(row["sequence_id"] // group_size, []).append(row)
    return [[row for group in list(groups.values())[rank::world] for row in group] for rank in range(world)]


def _smallest_passes(states: Rows[State]) -> dict[str, int]:
    """The smallest pass budget per name that OOM retries on any rank have left."""
    smallest: dict[str, int] = {}
    for state in states:
        for name, tokens in state["progress"].get("passes", {}).items():
            smallest[name] = min(tokens, smallest.get(name, tokens))
    return smallest


def _settled_cohorts(state: State) -> Cohorts:
    """A rank's cohorts including the responses finished in a half-done step."""
    cohorts = load_cohorts(state)
    half = (state["suspended"] or {}).get("batch")
    if half is not None and not _tail_batch(state):
        finished = [row for row in state["pool"] if row["sequence_id"] in set(half["finishers"])]
        cohorts.finish(Sequence(prompt=np.empty(0, dtype=np.int64), **row) for row in finished)
    return cohorts


def _merge_cohorts(cohorts: Rows[Cohorts]) -> Cohorts:
    newest = max(cohorts, key=lambda each: each.newest)
    merged = Cohorts(newest=newest.newest, newest_mean=newest.newest_mean)
    for each in cohorts:
        for cohort, count in each.started.items():
            merged.begin(cohort, count)
        for cohort, lengths in each.finished.items():
            merged.finished.setdefault(cohort, []).extend(lengths)
    return merged


def _split_cohorts(merged: Cohorts, waiting: Rows[Counter[int]]) -> list[Cohorts]:
    """Each rank counts its unfinished responses; the first rank with any of a cohort gets the cohort's finished lengths."""
    cohorts = [Cohorts(newest=merged.newest, newest_mean=merged.newest_mean) for _ in waiting]
    known = {cohort: lengths for cohort, lengths in merged.finished.items() if lengths}
    for rank_cohorts, counts in zip(cohorts, waiting, strict=True):
        for cohort, count in sorted(counts.items()):
            lengths = known.pop(cohort, [])
            rank_cohorts.begin(cohort, count + len(lengths))
            if lengths:
                rank_cohorts.finished[cohort] = lengths
    return cohorts


def _length_counted(row: State, state: State) -> bool:
    """Whether a response's length is in its cohort already; with tail batching lengths are added when it is trained."""
    return bool(row["finished"]) and not _tail_batch(state)


def _group_size(state: State) -> int:
    return int(state["spec"]["ppo"]["group_size"])


def _tail_batch(state: State) -> bool:
    return bool(state["spec"]["overlap"]["inter_step"] == "tail_batch")

"""What each rank keeps in a checkpoint for itself, and how another number of ranks takes it up.

Weights, moments, controllers and statistics are the run's and the same on all ranks. A rank's own are its answers in flight or
queued, its turns (`oppo_core/rollout/prompt_sharding.py`), and the lengths of its cohorts. When the run goes on with as many
ranks as it had, each takes its own back. Otherwise all of them read what all had, and deal it out in the same way.

Law: every answer goes to one rank, with all the tokens that it has; answers are dealt by age, so that none gets more overdue ones
than fit into its part of the batch. Keys and values are not dealt: they are built anew. Nor is what vLLM has written ahead of its
turn, and belongs to no answer yet: it is sampled again, so that nothing is lost or comes twice. A half-done step is begun anew
with the answers that it has, finished ones too.
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
    """A rank's part of a checkpoint: its state, and the folders in which the files of its answers lie.

    `dealt`: the checkpoint is another number of ranks'.
    """

    state: State
    homes: list[Path]
    dealt: bool = False


def load_rank_state(folder: Path, ranks: Ranks) -> RankState:
    """This rank's part of a checkpoint."""
    homes = rank_dirs(folder)
    if len(homes) == ranks.world:
        home = homes[ranks.rank]
        state = read_state(home)
        return RankState(state | {"turns": asdict(load_sharding(state, ranks.rank, ranks.world))}, [home])
    states = [read_state(home) for home in homes]
    return RankState(dealt(states, ranks.world)[ranks.rank], homes, dealt=True)


def rank_dirs(folder: Path) -> list[Path]:
    """The folders of the ranks that wrote a checkpoint."""
    world = load_stored_spec(read_state(folder)["spec"]).resources.ranks
    return [rank_dir(folder, rank) for rank in range(world)]


def read_state(home: Path) -> State:
    """A rank's `state.json`."""
    state: State = json.loads((home / STATE).read_text())
    return state


def load_sharding(state: State, rank: int, world: int) -> PromptSharding:
    """A rank's turns; format 4 told how many answers it had begun."""
    if "turns" in state:
        return PromptSharding(**state["turns"])
    return PromptSharding(rank, world, taken=state["sequences_started"] // _group_size(state))


def load_cohorts(state: State) -> Cohorts:
    """A rank's cohorts; JSON has text keys only."""
    told = state["cohorts"]
    return Cohorts(**told | {name: {int(k): v for k, v in told[name].items()} for name in ("started", "finished")})


def dealt(states: Rows[State], world: int) -> list[State]:
    """The states of all ranks of a checkpoint, dealt to `world` ranks; by rank."""
    first = states[0]
    pools, queues = (
        _deal((row for state in states for row in state[kind]), _group_size(first), world) for kind in ("pool", "queue")
    )
    mine = prompt_sharding.reshard_prompts([load_sharding(state, rank, len(states)) for rank, state in enumerate(states)], world)
    waiting = [
        Counter(row["cohort"] for row in [*pool, *queue] if not _counted(row, first))
        for pool, queue in zip(pools, queues, strict=True)
    ]
    cohorts = _deal_cohorts(_united([_settled(state) for state in states]), waiting)
    return [
        first
        | {"pool": pools[rank], "queue": queues[rank], "turns": asdict(mine[rank]), "cohorts": asdict(cohorts[rank])}
        | {"progress": first["progress"] | {"passes": _passes(states)}, "suspended": None}
        for rank in range(world)
    ]


def _deal(rows: Iterable[State], group_size: int, world: int) -> list[list[State]]:
    """Whole groups, the oldest first, to one rank after the other."""
    groups: dict[int, list[State]] = {}
    for row in sorted(rows, key=lambda row: (-row["age"], row["sequence_id"])):
        groups.setdefault(row["sequence_id"] // group_size, []).append(row)
    return [[row for group in list(groups.values())[rank::world] for row in group] for rank in range(world)]


def _passes(states: Rows[State]) -> dict[str, int]:
    """How small memory has made passes, of each name on that rank where it was shortest."""
    told = [(name, tokens) for state in states for name, tokens in state["progress"].get("passes", {}).items()]
    return {name: min(tokens for each, tokens in told if each == name) for name, _ in told}


def _settled(state: State) -> Cohorts:
    """A rank's cohorts, with those who have finished in a half-done step."""
    cohorts = load_cohorts(state)
    half = (state["suspended"] or {}).get("batch")
    if half is not None and not _tail_batch(state):
        finishers = set(half["finishers"])
        cohorts.finish(_bare(row) for row in state["pool"] if row["sequence_id"] in finishers)
    return cohorts


def _united(cohorts: Rows[Cohorts]) -> Cohorts:
    newest = max(cohorts, key=lambda each: each.newest)
    whole = Cohorts(newest=newest.newest, newest_mean=newest.newest_mean)
    for each in cohorts:
        for cohort, count in each.started.items():
            whole.begin(cohort, count)
        for cohort, lengths in each.finished.items():
            whole.finished.setdefault(cohort, []).extend(lengths)
    return whole


def _deal_cohorts(whole: Cohorts, waiting: Rows[Counter[int]]) -> list[Cohorts]:
    """Each rank counts what it has; the first that has some of a cohort keeps the lengths of the rest."""
    cohorts = [Cohorts(newest=whole.newest, newest_mean=whole.newest_mean) for _ in waiting]
    known = {cohort: lengths for cohort, lengths in whole.finished.items() if lengths}
    for mine, counts in zip(cohorts, waiting, strict=True):
        for cohort, count in sorted(counts.items()):
            lengths = known.pop(cohort, [])
            mine.begin(cohort, count + len(lengths))
            if lengths:
                mine.finished[cohort] = lengths
    return cohorts


def _counted(row: State, state: State) -> bool:
    """Whether an answer's length is among its cohort's; in tail batching it is once the answer is trained."""
    return bool(row["finished"]) and not _tail_batch(state)


def _bare(row: State) -> Sequence:
    """The answer as far as its length is asked for."""
    return Sequence(prompt=np.empty(0, dtype=np.int64), **row)


def _group_size(state: State) -> int:
    return int(state["spec"]["ppo"]["group_size"])


def _tail_batch(state: State) -> bool:
    return bool(state["spec"]["overlap"]["inter_step"] == "tail_batch")

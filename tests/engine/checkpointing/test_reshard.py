"""A run goes on with another number of ranks: no answer is lost or trained twice, and every prompt is drawn once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_core.checkpointing.reshard import load_cohorts, reshard_states
from oppo_core.checkpointing.save_restore import SEQUENCE_FIELDS
from oppo_core.reporting.metrics import Cohorts
from oppo_core.rollout.pool import Pool
from oppo_core.rollout.prompt_sharding import PromptSharding
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.tail_batch import TailBatchPool
from tests.engine.distributed.test_process_group import DEFER, PLAIN, Rank, Tree, sound, trained_by, weights

BATCH = 12  # among one to four ranks
PROMPT = np.asarray([1])
POOLS: dict[str, type[Pool]] = {"defer": Pool, "tail_batch": TailBatchPool}


@dataclass(frozen=True, slots=True)
class Case:
    """How the ranks of a run fare: in each part so many of them take some steps, the last of which may be cut off."""

    parts: list[tuple[int, list[int], bool]]  # ranks, Δ of each step, whether the last step is half-done
    rule: str
    group: int
    max_age: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    part = st.tuples(st.integers(1, 4), st.lists(st.integers(0, BATCH), max_size=4), st.booleans())
    return Case(
        draw(st.lists(part, min_size=2, max_size=5)), draw(st.sampled_from(sorted(POOLS))),
        draw(st.sampled_from([1, 1, 3])), draw(st.integers(1, 3)), draw(st.integers(0, 2**16)),
    )  # fmt: skip


class Member:
    """A rank that finishes its answers in a random order instead of decoding them."""

    def __init__(self, case: Case, state: Tree, world: int, random: np.random.Generator) -> None:
        self.random = random
        self.pool = POOLS[case.rule](BATCH // world, case.max_age, case.group, sharding=PromptSharding(**state["turns"]))
        self.pool.sequences, self.pool.queue = (
            [Sequence(prompt=PROMPT, **row) for row in state[kind]] for kind in ("pool", "queue")
        )
        self.cohorts = load_cohorts(json.loads(json.dumps(state)))
        self.drawn: list[int] = []
        self.finishers: list[Sequence] | None = None
        places = -(-(BATCH + BATCH) // world) * case.group
        assert len(self.pool.sequences) <= places, "more than there is room for"
        assert len(self.pool.overdue()) <= self.pool.rows, "more are overdue than a batch holds"

    def new(self, ids: range) -> list[Sequence]:
        """A group, whose prompt is drawn by its number."""
        self.drawn.append(ids.start // self.pool.group_size)
        return [Sequence(i, self.drawn[-1], PROMPT) for i in ids]

    def begin(self, overcommit: int, version: int) -> None:
        """Top up."""
        self.cohorts.begin(version, len(self.pool.top_up(overcommit, version, self.new)))
        self.finishers = []

    def finish(self, half: bool) -> list[int]:
        """Decode until the batch is complete, or for a while only; the batch's numbers."""
        assert self.finishers is not None
        waiting = [*self.pool.unfinished()]
        self.random.shuffle(waiting)  # type: ignore[arg-type]
        while not self.pool.is_complete(self.finishers):
            if half and self.random.random() < 0.2:
                return []
            ended = waiting.pop()
            ended.finished, ended.response = True, [7] * int(self.random.integers(1, 9))
            self.finishers.append(ended)
        if half:
            return []
        batch = self.pool.take_batch(self.finishers)
        self.cohorts.finish(self.pool.final(self.finishers, batch))
        self.pool.discarded, self.finishers = [], None
        return [s.sequence_id for s in batch]

    def saved(self, case: Case) -> Tree:
        """What a checkpoint keeps of it."""
        pool = self.pool
        rows = [[{name: getattr(s, name) for name in SEQUENCE_FIELDS} for s in kind] for kind in (pool.sequences, pool.queue)]
        half = None if self.finishers is None else {"batch": {"finishers": [s.sequence_id for s in self.finishers]}}
        spec = {"ppo": {"group_size": case.group}, "overlap": {"inter_step": case.rule}}
        state = {"spec": spec, "pool": rows[0], "queue": rows[1], "suspended": half, "progress": {}}
        state |= {"turns": asdict(pool.sharding), "cohorts": asdict(self.cohorts)}
        told: Tree = json.loads(json.dumps(state))
        return told


@settings(max_examples=60, deadline=None)
@given(cases())
def test_resharding_loses_no_response_and_draws_each_prompt_once(case: Case) -> None:
    random, version = np.random.default_rng(case.seed), 0
    states = [{"turns": asdict(PromptSharding()), "pool": [], "queue": [], "cohorts": asdict(Cohorts())}]
    drawn: list[int] = []
    trained: list[int] = []
    for world, overcommits, half in [*case.parts, (1, [0] * 6, False)]:
        blank = [states[0] | {"turns": asdict(PromptSharding(rank, world))} for rank in range(world)]
        states = reshard_states(states, world) if version else blank
        members = [Member(case, state, world, random) for state in states]
        for number, overcommit in enumerate(overcommits):
            for rank, member in enumerate(members):
                member.begin((overcommit + world - 1 - rank) // world, version)
                trained += member.finish(half and number == len(overcommits) - 1)
            version += 1
        drawn += [number for member in members for number in member.drawn]
        left = [s.sequence_id for member in members for s in (*member.pool.sequences, *member.pool.queue)]
        assert sorted(drawn) == sorted(set(drawn)), "a prompt was drawn twice"
        assert sorted({i // case.group for i in trained + left}) == sorted(drawn)
        assert len(trained + left) == len(set(trained + left)) == len(drawn) * case.group, "lost, or in two places"
        states, version = [member.saved(case) for member in members], max(version, 1)
        _assert_cohorts_fit(members, case)
    owed = states[0]["turns"]["owed"][states[0]["turns"]["taken"] :]
    assert sorted([*drawn, *owed]) == list(range(len(drawn) + len(owed))), "a prompt was passed over"


def _assert_cohorts_fit(members: list[Member], case: Case) -> None:
    """What a cohort waits for is what is there of it."""
    for member in members:
        waiting = [s for s in member.pool.sequences if not s.finished or case.rule == "tail_batch" or _unsettled(member, s)]
        for cohort, count in member.cohorts.started.items():
            there = sum(s.cohort == cohort for s in (*waiting, *member.pool.queue))
            assert there == count - len(member.cohorts.finished.get(cohort, [])), cohort


def _unsettled(member: Member, sequence: Sequence) -> bool:
    return member.finishers is not None and any(s is sequence for s in member.finishers)


def test_format_4_told_how_many_answers_were_begun_and_nothing_of_turns() -> None:
    spec = {"ppo": {"group_size": 2}, "overlap": {"inter_step": "off"}}
    old = {"spec": spec, "pool": [], "queue": [], "suspended": None, "cohorts": asdict(Cohorts())}
    # Groups 0, 2, 4 and 1; the second rank has less memory.
    counts = ((6, {"actor": 64, "scorers": 32}), (2, {"actor": 16}))
    states = [old | {"sequences_started": count, "progress": {"step": 3, "passes": passes}} for count, passes in counts]
    (one,) = reshard_states(states, 1)
    assert one["progress"] == {"step": 3, "passes": {"actor": 16, "scorers": 32}}
    turns = PromptSharding(**one["turns"])
    assert [turns.take() for _ in range(3)] == [3, 5, 6]


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
        told.append(sound(trained_by(world, spec, out, count, resume, inline=True, **more)))
        resume = max((out / "checkpoints").iterdir())
    return told


def test_one_rank_and_three_take_up_what_two_have_done_and_compute_what_one_would(world: Any, tmp_path: Path) -> None:
    parts = going_on(world, tmp_path / "parts", [2, 1, 3, 2], PLAIN)
    (whole,) = sound(trained_by(world, world.spec(PLAIN, ranks(1, 4)), tmp_path / "whole", 1))
    metrics = [step for part in parts for step in part[0].metrics]
    assert len(metrics) == len(whole.metrics) == 4
    for ours, theirs in zip(metrics, whole.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-7, abs=1e-9, nan_ok=True)
    for rank in parts[-1]:
        for key, value in weights(whole).items():
            torch.testing.assert_close(weights(rank)[key], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", ["defer", pytest.param("tail_batch", marks=pytest.mark.full)])
def test_answers_in_flight_go_on_with_whoever_takes_the_run_up(world: Any, tmp_path: Path, rule: str) -> None:
    parts = going_on(world, tmp_path, [2, 3, 1], DEFER, {"overlap": {"inter_step": rule}}, each=2)
    trained = [i for part in parts for rank in part for batch in rank.trained for i in batch]
    (last,) = parts[-1]
    pool = last.engine.pool
    left = [s.sequence_id for s in (*pool.sequences, *pool.queue)]
    assert len(trained) == 6 * 6
    assert len(set(trained + left)) == len(trained + left)
    assert {*trained, *left, *pool.sharding.owed[pool.sharding.taken :]} == set(range(pool.sharding.coming))


@pytest.mark.full
def test_a_half_done_step_is_begun_anew_with_the_tokens_that_it_has(world: Any, tmp_path: Path) -> None:
    def stop(rank: int, chunks: int) -> bool:
        return chunks >= 4

    parts = going_on(world, tmp_path, [2, 3, 1], DEFER, each=2, stop=stop)
    assert any("-chunk-" in folder.name for folder in (tmp_path / "checkpoints").iterdir())
    trained = [i for part in parts for rank in part for batch in rank.trained for i in batch]
    (last,) = parts[-1]
    pool = last.engine.pool
    left = [s.sequence_id for s in pool.sequences]
    assert len(set(trained + left)) == len(trained + left)
    assert {*trained, *left, *pool.sharding.owed[pool.sharding.taken :]} == set(range(pool.sharding.coming))

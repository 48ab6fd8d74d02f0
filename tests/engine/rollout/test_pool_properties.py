"""No sequence is lost or trained twice, and the batch is the one of docs/algorithm.md, step (3), for any answer lengths.

Pool, delta tracker and the training loop's `decode_batch` and `begin_step` are the engine's own. Only the network is replaced, by
scripted answer lengths.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_contract.sections.training import PLAIN_TRAINING
from oppo_core.control.controllers import ChunkState, OvercommitState
from oppo_core.distributed.process_group import SINGLE, Ranks
from oppo_core.engine.layout import Layout
from oppo_core.engine.state import Engine, Progress
from oppo_core.reporting.metrics import Cohorts
from oppo_core.rollout.distributed_decoder import DistributedDecoder
from oppo_core.rollout.pool import Pool
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.step_state import StepState
from oppo_core.rollout.tail_batch import TailBatchPool
from oppo_core.scoring.deltas import DeltaTracker
from oppo_core.scoring.scorers import SequenceDelta
from oppo_core.trace.recorder import Recorder
from oppo_core.train import begin_step, decode_batch
from oppo_core.update.strategies import PlainUpdate
from tests.fakes.thread_ranks import on_threads

LONGEST = 40


@dataclass(slots=True)
class ScriptedDecoder:
    """Advances every live sequence by one token per round; sequence i ends after `lengths[i % n]` tokens."""

    lengths: list[int]
    live: list[Sequence] = field(default_factory=list)
    rounds: int = 0
    decoded: int = 0

    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        self.live = list(sequences)
        self.decoded = 0
        return 0

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        for used in range(1, rounds + 1):
            done = self.round(version)
            if done:
                return done, used
        return [], rounds

    def round(self, version: int) -> list[Sequence]:
        assert self.live, "decoding continues without live sequences"
        self.rounds += 1
        self.decoded += len(self.live)
        for sequence in self.live:
            sequence.response.append(1000 * sequence.sequence_id + sequence.length)
            sequence.behaviour_logprobs.append(0.0)
            sequence.token_versions.append(version)
            sequence.finished = sequence.length == self.lengths[sequence.sequence_id % len(self.lengths)]
        done = [s for s in self.live if s.finished]
        self.live = [s for s in self.live if not s.finished]
        return sorted(done, key=lambda s: s.sequence_id)


@dataclass(slots=True)
class Listener:
    """Fake scorers that check that each token arrives once, in order, prompt first."""

    heard: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: set[int] = field(default_factory=set)
    chunks: list[int] = field(default_factory=list)

    def begin(self, deltas: list[SequenceDelta]) -> None:
        self.extend(deltas, 0)

    def extend(self, deltas: list[SequenceDelta], chunk: int) -> None:
        assert [g.sequence_id for g in deltas] == sorted({g.sequence_id for g in deltas})
        self.chunks.append(chunk)
        for delta in deltas:
            assert delta.sequence_id not in self.ended, "sent again after its end"
            self.heard[delta.sequence_id] += delta.tokens.tolist()
            if delta.finished:
                self.ended.add(delta.sequence_id)

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            del self.heard[sequence_id]
            self.ended.discard(sequence_id)


@dataclass(frozen=True, slots=True)
class Case:
    """Answer lengths, B, Δ by step, C, max_age, and whether chunks are streamed."""

    lengths: list[int]
    batch: int
    overcommits: list[int]
    max_age: int
    chunk: int = 5
    streamed: bool = True
    group: int = 1

    def length(self, sequence_id: int) -> int:
        """Length of an answer."""
        return self.lengths[sequence_id % len(self.lengths)]

    @property
    def rows(self) -> int:
        """Answers trained per step."""
        return self.batch * self.group


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=30))
    overcommits = draw(st.lists(st.integers(0, batch), min_size=1, max_size=8))
    group = draw(st.sampled_from([1, 1, 2, 3, 5]))
    return Case(lengths, batch, overcommits, draw(st.integers(1, 4)), draw(st.integers(1, 50)), draw(st.booleans()), group)


class Simulation:
    """An engine with a scripted decoder and without training."""

    def __init__(self, case: Case, kind: type[Pool] = Pool, ranks: Ranks = SINGLE) -> None:
        self.case = case
        self.listener = Listener()
        own, trace = ScriptedDecoder(case.lengths), Recorder(("cpu:0",))
        self.engine: Any = SimpleNamespace(
            pool=kind(case.batch, case.max_age, case.group), trace=trace,
            decoder=own if ranks.world == 1 else DistributedDecoder(own, ranks, trace.clock, partial(trace.blocked, "tail")),
            scorers=self.listener, deltas=DeltaTracker(), cohorts=Cohorts(), overcommit=OvercommitState(0),
            chunk=ChunkState(case.chunk), new_group=lambda ids: [Sequence(i, 0, np.asarray([-1, -i - 1])) for i in ids],
            layout=Layout(["cpu:0"], ("cpu:0",), ("cpu:0",), 1, streams=case.streamed), clock=time.monotonic,
            use_cores=lambda count: None, update=PlainUpdate(), ranks=ranks, progress=Progress(),
            spec=SimpleNamespace(
                ppo=SimpleNamespace(dynamic_sampling=0, batch_size=case.batch, group_size=case.group),
                overlap=SimpleNamespace(
                    intra_step="per_chunk", inter_step="defer", overcommit=SimpleNamespace(max=case.batch)
                ),
                rollout=SimpleNamespace(max_new_tokens=LONGEST), resources=SimpleNamespace(ranks=ranks.world),
                training=PLAIN_TRAINING,
            ),
        )  # fmt: skip
        for name in ("release", "on_any_rank", "local", "check_pools", "place", "balance", "readable"):
            setattr(self.engine, name, partial(getattr(Engine, name), self.engine))

    @property
    def pool(self) -> Pool:
        """The engine's pool."""
        return self.engine.pool

    def decoded(self, batch: StepState, version: int) -> list[Sequence]:
        """Decode to the end of the step; returns its batch."""
        assert decode_batch(self.engine, batch, version, lambda: False)
        return batch.sequences

    def step(self, version: int) -> tuple[list[Sequence], list[Sequence], int]:
        """One step: the pool after topping up (copies), the batch, and the rounds decoded."""
        self.engine.overcommit.overcommit = self.case.overcommits[version]
        in_the_making = begin_step(self.engine, version)
        before = [
            Sequence(s.sequence_id, 0, s.prompt, list(s.response), age=s.age, finished=s.finished) for s in self.pool.sequences
        ]
        rounds = self.engine.decoder.rounds
        batch = self.decoded(in_the_making, version)
        self.engine.deltas.forget([s.sequence_id for s in batch])
        return before, batch, self.engine.decoder.rounds - rounds


def expected_batch(before: list[Sequence], case: Case) -> tuple[set[int], int]:
    """docs/algorithm.md step (3), reimplemented: the batch, and the rounds until it is complete.

    A group ends with its last member. Order: overdue groups, then finished surplus in FIFO order, then by (round, group).
    """
    left: dict[int, int] = defaultdict(int)
    ages = {}
    for s in before:
        group = s.sequence_id // case.group
        left[group], ages[group] = max(left[group], case.length(s.sequence_id) - s.length), s.age
    overdue = [group for group, age in ages.items() if age >= case.max_age]
    surplus = [group for group in ages if left[group] == 0 and group not in overdue]
    others = sorted((left[group], group) for group in ages if left[group] > 0 and group not in overdue)
    chosen = (overdue + surplus + [group for _, group in others])[: case.batch]
    ids = {group * case.group + member for group in chosen for member in range(case.group)}
    return ids, max(left[group] for group in chosen)


@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_every_step_trains_exactly_the_right_sequences(case: Case) -> None:
    simulation, trained, seen = Simulation(case), set[int](), set[int]()
    for version in range(len(case.overcommits)):
        before, batch, rounds = simulation.step(version)
        ids = [s.sequence_id for s in batch]
        wanted, needed = expected_batch(before, case)
        assert set(ids) == wanted
        assert rounds == needed, "decoding must stop at the round that completes the batch"
        assert len(ids) == case.rows == len(set(ids))
        assert all(s.finished and s.length == case.length(s.sequence_id) for s in batch)
        assert all(s.age <= case.max_age for s in batch), "older than allowed"
        assert not trained & set(ids), "trained twice"
        assert {s.sequence_id for s in before if s.age == case.max_age} <= set(ids), "an overdue sequence was left out"
        trained |= set(ids)
        seen |= {s.sequence_id for s in before}
        assert {s.sequence_id for s in simulation.pool.sequences} == seen - trained, "lost, or in two places"
    assert seen == set(range(simulation.pool.started)), "every number was used once"


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_ages_count_deferrals_and_the_pool_stays_in_fifo_order(case: Case) -> None:
    simulation, submitted = Simulation(case), dict[int, int]()
    for version in range(len(case.overcommits)):
        before, batch, _ = simulation.step(version)
        for sequence in before:
            submitted.setdefault(sequence.sequence_id, version)
        assert [s.sequence_id for s in before] == sorted(submitted.keys() & {s.sequence_id for s in before})
        assert all(s.age == version - submitted[s.sequence_id] == version - s.cohort for s in batch)
        assert all(s.age == version + 1 - submitted[s.sequence_id] for s in simulation.pool.sequences)


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_lowering_overcommit_stops_refilling_and_evicts_nothing(case: Case) -> None:
    simulation, left = Simulation(case), list[int]()
    for version, overcommit in enumerate(case.overcommits):
        before, batch, _ = simulation.step(version)
        ids = [s.sequence_id for s in before]
        assert ids[: len(left)] == left, "an old sequence went missing"
        assert len(ids) == max(len(left), case.rows + overcommit * case.group)
        left = [i for i in ids if i not in {s.sequence_id for s in batch}]


@settings(max_examples=150, deadline=None)
@given(case=cases(), sizes=st.lists(st.integers(1, 60), min_size=2, max_size=2, unique=True))
def test_the_chunk_size_does_not_change_the_batches(case: Case, sizes: list[int]) -> None:
    first, second = (Simulation(case) for _ in sizes)
    first.engine.chunk.size, second.engine.chunk.size = sizes
    for version in range(len(case.overcommits)):
        _, one, rounds_one = first.step(version)
        _, other, rounds_other = second.step(version)
        assert [(s.sequence_id, s.response, s.token_versions) for s in one] == [
            (s.sequence_id, s.response, s.token_versions) for s in other
        ]
        assert rounds_one == rounds_other
        assert repr(first.pool.sequences) == repr(second.pool.sequences)


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_each_token_is_sent_exactly_once(case: Case) -> None:
    simulation = Simulation(case)
    for version in range(len(case.overcommits)):
        _, batch, rounds = simulation.step(version)
        for sequence in batch:
            assert simulation.listener.heard[sequence.sequence_id] == sequence.tokens().tolist()
            assert sequence.sequence_id in simulation.listener.ended
        if case.streamed:
            assert simulation.listener.chunks == list(range(-(-rounds // case.chunk) + 1))
            for sequence in simulation.pool.sequences:  # a prompt may be sent with its first tokens
                heard = simulation.listener.heard[sequence.sequence_id]
                assert heard == sequence.tokens().tolist() or (heard == [] and sequence.length == 0)
        simulation.listener.chunks.clear()


@settings(max_examples=60, deadline=None)
@given(case=cases(), world=st.integers(2, 4), kind=st.sampled_from([Pool, TailBatchPool]))
def test_any_number_of_ranks_has_the_batches_of_one(case: Case, world: int, kind: type[Pool]) -> None:
    """Every rank sees the same batches in the same order; the tokens of a response are on exactly one of them."""

    def work(ranks: Ranks) -> list[Any]:
        simulation, told = Simulation(case, kind, ranks), list[Any]()
        for version in range(len(case.overcommits)):
            _, batch, rounds = simulation.step(version)
            queued = [s.sequence_id for s in simulation.pool.queue]
            known = [[(s.sequence_id, s.age, s.cohort, s.length) for s in rows] for rows in (batch, simulation.pool.sequences)]
            here = {s.sequence_id: s.response for s in simulation.engine.local(batch)}
            kept = {s.sequence_id: s.response for s in simulation.engine.local(simulation.pool.sequences)}
            unfinished = sum(not s.finished for s in simulation.engine.local(simulation.pool.sequences))
            assert unfinished <= -(-2 * case.rows // ranks.world), "more than the decoder has slots for"
            heard = {s.sequence_id: simulation.listener.heard.pop(s.sequence_id) for s in simulation.engine.local(batch)}
            assert heard == {s.sequence_id: s.tokens().tolist() for s in simulation.engine.local(batch)}, "scored once, here"
            told.append(((rounds, known, queued, simulation.engine.decoder.decoded), here, kept))
        return told

    (one,), ranks = on_threads(1, work), on_threads(world, work)
    for step, (seen, here, kept) in enumerate(one):
        assert [rank[step][0] for rank in ranks] == [seen] * world
        for place, rows in ((1, here), (2, kept)):
            parts = [rank[step][place] for rank in ranks]
            assert sum(map(len, parts)) == len(rows), "on no rank, or on two"
            assert {i: tokens for part in parts for i, tokens in part.items()} == rows


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_certain_sequences_are_in_the_batch_whatever_else_finishes(case: Case) -> None:
    simulation, certain = Simulation(case), list[set[int]]()
    plain = simulation.pool.is_complete

    def is_complete(finishers: list[Sequence]) -> bool:
        certain.append({s.sequence_id for s in simulation.pool.certain(finishers)})
        return plain(finishers)

    simulation.engine.pool = Watched(simulation.pool, is_complete)
    for version in range(len(case.overcommits)):
        certain.clear()
        _, batch, _ = simulation.step(version)
        assert all(before <= after for before, after in pairwise([*certain, {s.sequence_id for s in batch}]))


class Watched:
    """A pool that records its calls."""

    def __init__(self, pool: Pool, is_complete: Callable[[list[Sequence]], bool]) -> None:
        self._pool, self.is_complete = pool, is_complete

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_tail_batching_trains_every_prompt_once_and_only_with_the_newest_weights(case: Case) -> None:
    simulation, trained = Simulation(case, TailBatchPool), list[int]()
    pool, waiting = simulation.pool, list[int]()
    for version, overcommit in enumerate(case.overcommits):
        queued = len(waiting) >= case.rows
        before, batch, rounds = simulation.step(version)
        started = [s.sequence_id for s in before]
        assert started == (waiting[: case.rows] if queued else list(range(pool.started - pool.capacity, pool.started)))
        assert pool.overcommit == (0 if queued else overcommit)
        wanted, needed = expected_batch(before, replace(case, max_age=10**9))
        assert {s.sequence_id for s in batch} == wanted
        assert rounds == needed
        assert all(set(s.token_versions) == {version} and s.age == 0 for s in batch), "a stale token"
        wasted = [min(case.length(s.sequence_id), rounds) for s in pool.discarded]
        assert [s.length for s in pool.discarded] == wasted
        assert not pool.sequences, "an answer was not discarded"
        trained += [s.sequence_id for s in batch]
        waiting = [i for i in waiting if i not in trained] + [i for i in started if i not in {*waiting, *trained}]
        assert [s.sequence_id for s in pool.queue] == waiting
        assert all(s.length == 0 and not s.finished for s in pool.queue)
        assert pool.unconsumed == len(waiting)
        assert sorted(trained + waiting) == list(range(pool.started)), "lost, or trained twice"
        assert simulation.listener.heard.keys() <= set(trained), "the scorers keep what was discarded"
        assert len(simulation.engine.cohorts.started) <= version + 1


def test_a_resumed_step_of_tail_batching_keeps_its_sequences() -> None:
    """A run may resume half-way through a step with other settings; current and queued prompts are kept."""
    simulation = Simulation(Case([30, 5, 7, 9, 4, 6], batch=2, overcommits=[2, 2], max_age=2), TailBatchPool)
    pool = simulation.pool
    simulation.step(0)
    assert [s.sequence_id for s in pool.queue] == [0, 3]
    begin_step(simulation.engine, 1)
    simulation.engine.decoder.advance(4, 1)
    before = [(s.sequence_id, s.length, s.finished) for s in pool.sequences]
    assert before == [(0, 4, False), (3, 4, False)]
    again = begin_step(simulation.engine, 1)
    assert [(s.sequence_id, s.length, s.finished) for s in pool.sequences] == before
    assert pool.overcommit == 0
    batch = simulation.decoded(again, 1)
    assert [(s.sequence_id, s.length) for s in batch] == [(0, 30), (3, 9)]
    assert pool.unconsumed == 0


def test_tokens_keep_the_version_they_were_sampled_under() -> None:
    """A long answer among short ones is deferred twice and holds tokens of three versions; then the batch waits for it."""
    simulation = Simulation(Case([30, 5, 5, 5, 5, 5, 5, 5, 5], batch=2, overcommits=[1] * 4, max_age=2))
    batches = [[s.sequence_id for s in simulation.step(version)[1]] for version in range(3)]
    assert batches == [[1, 2], [3, 4], [0, 5]]
    simulation = Simulation(Case([30, 5, 5, 5, 5, 5, 5, 5, 5], batch=2, overcommits=[1] * 4, max_age=2))
    for version in range(3):
        batch = simulation.step(version)[1]
    assert batch[0].token_versions == [0] * 5 + [1] * 5 + [2] * 20

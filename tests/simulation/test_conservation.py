"""No sequence is lost or trained twice, whatever the lengths, settings, crashes and resumes; and what is resumed trains the same.

The loop, the pool, the controllers, the hand-over and the checkpoints are the engine's own; only time and tokens are simulated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from oppo_contract.spec import RunSpec, load_spec
from oppo_core.checkpointing.save_restore import restore, verify
from oppo_core.control.stop_conditions import ALL_DONE
from oppo_core.engine.state import Engine
from oppo_core.rollout.sequence import Sequence
from oppo_core.simulation.assemble import MemoryJournal, assemble
from oppo_core.train import train
from oppo_estimate.devices import Devices, load_devices

LONGEST = 40
# Checkpoints are synced to their disk, and there are thousands of them: a disk in memory, where there is one.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
EVEN = load_devices("even")
SHARED = EVEN.model_copy(update={"without_streaming": "share", "contention": 1.25})
DEVICES = (EVEN, SHARED)


@dataclass(frozen=True, slots=True)
class Case:
    """A run, the steps at which it dies (never having told anybody), and how long its answers are.

    `stops`: after how many chunks it is asked to stop, first, second, … time; it is resumed each time.
    """

    spec: RunSpec
    devices: Devices
    lengths: tuple[int, ...]
    crashes: tuple[int, ...]
    stops: tuple[int, ...] = ()

    def length(self, sequence_id: int) -> int:
        """See `oppo_core.simulation.lengths`."""
        return self.lengths[sequence_id % len(self.lengths)]


@st.composite
def overlaps(draw: st.DrawFn, batch: int, has_critic: bool) -> dict[str, Any]:
    low, middle, high = sorted(draw(st.lists(st.integers(0, batch), min_size=3, max_size=3)))
    intra, inter = draw(st.sampled_from(["off", "per_sequence", "per_chunk"])), draw(st.sampled_from(INTER_STEPS))
    return {
        "intra_step": intra, "inter_step": inter, "max_age": draw(st.integers(1, 4)),
        "update_overlap": has_critic and intra != "off" and draw(st.booleans()),
        "kv_after_update": draw(st.sampled_from(["recompute", "keep"] if inter == "defer" else ["recompute"])),
        "overcommit": {
            "controller": draw(st.sampled_from(["fixed", "slope"])), "initial": middle, "min": low, "max": high, "window": 2,
            "rule": draw(st.sampled_from(["additive", "proportional"])),
        },
        "chunk": {
            "controller": draw(st.sampled_from(["fixed", "tuner"])), "size": draw(st.integers(1, LONGEST)), "explore_every": 2,
            "candidates": [3, 7],
        },
    }  # fmt: skip


INTER_STEPS = ["off", "defer", "defer", "tail_batch"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch, steps = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    algorithm = draw(st.sampled_from(["ppo", "ppo", "grpo", "rloo"]))
    ppo = {"batch_size": batch, "algorithm": algorithm, "group_size": 1 if algorithm == "ppo" else draw(st.integers(2, 4))}
    spec = load_spec({
        "name": "conserved", "seed": draw(st.integers(0, 3)), "steps": steps, "data": {"prompts": "none"},
        "models": {"actor": {"path": "none"}, "reward": {"model": {"path": "none"}}}, "ppo": ppo,
        "rollout": {"max_new_tokens": LONGEST, "max_prompt_tokens": 4},
        "overlap": draw(overlaps(batch, algorithm == "ppo")),
        "checkpoints": {"every_steps": draw(st.integers(1, 4)), "keep": 2}, "logging": {"samples_per_step": 0},
    })  # fmt: skip
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=30))
    crashes = draw(st.lists(st.integers(1, steps), max_size=3))
    stops = draw(st.lists(st.integers(1, 6), max_size=6))
    return Case(spec, draw(st.sampled_from(DEVICES)), tuple(lengths), tuple(crashes), tuple(stops))


class Crash(Exception):
    """The process is gone; nothing is saved."""


@dataclass(slots=True)
class History:
    """What a run trained, step by step, crashed attempts included, and its last engine."""

    trained: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    engine: Engine | None = None
    repeated: bool = True  # whether every repeated step trained the same as the first time


@contextmanager
def watched(engine: Engine, history: History) -> Iterator[None]:
    """Note every batch as the loop trains it."""
    plain = engine.experience

    def experience(batch: list[Sequence], *rest: Any) -> Any:
        told = [(s.sequence_id, s.prompt_index, s.age, s.cohort, list(s.response), list(s.token_versions)) for s in batch]
        step = engine.progress.step
        history.repeated &= history.trained.setdefault(step, told) == told
        return plain(batch, *rest)

    engine.experience = experience
    yield


def run(case: Case, out: Path, crashes: tuple[int, ...] = (), stops: tuple[int, ...] = ()) -> History:
    """Train to the end, dying and stopping as told (see `Case`), each time resuming from the newest checkpoint."""
    history, left, patience = History(), list(crashes), list(stops)
    while True:
        engine = history.engine = assemble(case.spec, case.devices, case.length, out=out)
        saved = sorted((out / "checkpoints").glob("step-*"))
        if saved:
            verify(saved[-1], case.spec)
            restore(engine, saved[-1])

        def should_stop(engine: Engine = engine) -> bool:
            if engine.progress.step in left:
                left.remove(engine.progress.step)
                raise Crash
            if patience:
                patience[0] -= 1
            return bool(patience) and patience[0] == 0

        try:
            with watched(engine, history):
                reason = train(engine, should_stop)
        except Crash:
            continue
        if reason == ALL_DONE:
            return history
        patience.pop(0)


def assert_conserved(case: Case, history: History) -> None:
    """Every sequence that was ever started is in exactly one batch or still in the pool, which alone may hold unfinished ones."""
    engine = history.engine
    assert engine is not None
    ids = [row[0] for batch in history.trained.values() for row in batch]
    left = [s.sequence_id for s in (*engine.pool.sequences, *engine.pool.queue)]
    assert sorted(history.trained) == list(range(case.spec.steps)), "a step is missing"
    assert len(ids) == len(set(ids)), "trained twice"
    assert sorted(ids + left) == list(range(engine.pool.started)), "lost, or in two places"
    assert len(ids) == case.spec.steps * case.spec.ppo.rows
    assert engine.pool.unconsumed == len(left)
    on_policy = case.spec.overlap.inter_step != "defer"
    for step, batch in history.trained.items():
        assert_whole_groups(batch, case.spec.ppo.group_size)
        for sequence_id, _, age, cohort, response, versions in batch:
            assert len(response) == len(versions) == case.length(sequence_id), "trained before it was finished"
            assert versions == ([step] * len(versions) if on_policy else sorted(versions)), "a stale token"
            assert cohort <= versions[0] <= versions[-1] <= step
            assert age == (0 if on_policy else step - cohort) <= case.spec.overlap.max_age


def assert_whole_groups(batch: list[tuple[Any, ...]], size: int) -> None:
    """All members of a group, and nobody else, answer its prompt in this batch."""
    ids = [row[0] for row in batch]
    assert ids == [first + member for first in ids[::size] for member in range(size)]
    assert all(first % size == 0 for first in ids[::size])
    assert all(len({row[1] for row in batch[at : at + size]}) == 1 for at in range(0, len(batch), size))


def check(case: Case) -> None:
    """A run with crashes and stops conserves every sequence and trains what a run without them trains."""
    overlap, ppo = case.spec.overlap, case.spec.ppo
    event(f"{overlap.intra_step}, {overlap.inter_step}, {ppo.algorithm}, update overlap {overlap.update_overlap}")
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        plain = run(case, Path(folder) / "plain")
        crashed = run(case, Path(folder) / "crashed", case.crashes, case.stops)
    assert_conserved(case, plain)
    assert_conserved(case, crashed)
    assert crashed.repeated, "a repeated step trained something else"
    assert crashed.trained == plain.trained
    assert decisions(plain.engine) == decisions(crashed.engine)


def decisions(engine: Engine | None) -> tuple[Any, ...]:
    """Where the run's controllers and counters ended; the tuner's measured times need not be the same."""
    assert engine is not None
    assert isinstance(engine.journal, MemoryJournal)
    progress = engine.progress
    return repr(engine.overcommit), repr(engine.cohorts), progress.step, progress.generated_tokens, engine.pool.started


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_no_sequence_is_lost_or_trained_twice(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.timeout(1200)
@settings(max_examples=4000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_no_sequence_is_lost_or_trained_twice_in_thousands_of_cases(case: Case) -> None:
    check(case)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), others=st.lists(st.tuples(st.sampled_from(["off", "per_chunk"]), st.integers(1, LONGEST)), min_size=1))
def test_resumed_half_way_with_other_settings_nothing_is_lost_either(case: Case, others: list[tuple[str, int]]) -> None:
    """Every attempt has another C and another intra-step overlap, and all of them train what one run without a stop trains."""
    tree = case.spec.model_dump(mode="json")
    tree["overlap"] |= {"update_overlap": False}
    history, attempts = History(), [*others, *others[:1]] * 4
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        while history.engine is None or history.engine.progress.step < case.spec.steps:
            intra, chunk = attempts.pop(0) if attempts else others[0]
            tree["overlap"] |= {"intra_step": intra, "chunk": tree["overlap"]["chunk"] | {"size": chunk, "controller": "fixed"}}
            engine = history.engine = assemble(load_spec(tree), case.devices, case.length, out=Path(folder))
            saved = sorted((Path(folder) / "checkpoints").glob("step-*"))
            if saved:
                restore(engine, saved[-1], verify(saved[-1], engine.spec))
            chunks = iter([False] * len(attempts))
            with watched(engine, history):
                train(engine, lambda chunks=chunks, more=bool(attempts): next(chunks, more))
        plain = run(Case(load_spec(tree), case.devices, case.lengths, ()), Path(folder) / "plain")
    assert_conserved(case, history)
    assert history.repeated
    assert history.trained == plain.trained


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), intra=st.sampled_from(["off", "per_sequence", "per_chunk"]), chunk=st.integers(1, LONGEST))
def test_when_scorers_read_and_how_long_chunks_are_decides_about_time_alone(case: Case, intra: str, chunk: int) -> None:
    tree = case.spec.model_dump(mode="json")
    tree["overlap"] |= {"intra_step": intra, "update_overlap": False, "chunk": {"controller": "fixed", "size": chunk}}
    other = Case(load_spec(tree), case.devices, case.lengths, ())
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        one, same = run(case, Path(folder) / "one"), run(other, Path(folder) / "other")
    assert one.trained == same.trained

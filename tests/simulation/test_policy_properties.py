"""The laws of the scheduling policy on random clusters, and the proof that every law would notice a policy that breaks it."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oppo_platform.scheduling.policy as policy
from oppo_platform.scheduling.policy.queue import Queue
from tests.simulation.policy_lives import LIVES
from tests.simulation.policy_mutants import MUTANTS, Mutant
from tests.simulation.policy_properties import PROPERTIES
from tests.simulation.policy_snapshots import NOW, random_snapshot

plan_module: Any = import_module("oppo_platform.scheduling.policy.plan")  # the package's `plan` is the function
RANDOM = st.integers(0, 2**32 - 1).map(Random)
SEEDS = 1500  # within so many a broken policy has to be caught


def broken_laws(law: str, rng: Random) -> set[str]:
    """Which laws do not hold for this draw: of a plan all are tried, of many plans only `law`."""
    tried = {law: LIVES[law]} if law in LIVES else {}
    if not tried:
        snapshot = random_snapshot(rng)
        decisions = policy.plan(snapshot, NOW)
    broken = set()
    for name in tried or PROPERTIES:
        try:
            if name in LIVES:
                LIVES[name](rng)
            else:
                PROPERTIES[name](snapshot, decisions)
        except AssertionError:
            broken.add(name)
    return broken


@settings(max_examples=60, deadline=None)
@given(RANDOM)
def test_the_shortcut_for_the_rest_of_a_plan_changes_nothing(rng: Random) -> None:
    """A plan that looks after every blocked run whether a later one can start, and one that never looks."""
    snapshot = random_snapshot(rng)
    snapshot = replace(snapshot, settings=replace(snapshot.settings, lookahead=rng.choice([0, 1, 3])))
    plans = []
    for first_check in (1, 1 << 30):
        with mock.patch.object(plan_module, "FIRST_CHECK", first_check):
            plans.append(policy.plan(snapshot, NOW))
    assert plans[0] == plans[1]


def test_the_shortcut_is_taken() -> None:
    """In some of the random snapshots at least."""
    with mock.patch.object(plan_module, "FIRST_CHECK", 1), mock.patch.object(Queue, "rest", return_value=iter(())) as rest:
        for seed in range(200):
            snapshot = random_snapshot(Random(seed))
            policy.plan(replace(snapshot, settings=replace(snapshot.settings, lookahead=0)), NOW)
    assert rest.call_count > 20


@given(RANDOM)
@example(Random(3530621))  # with the young to choose from, a set of others is found that was not found before
def test_every_law_holds_for_a_plan(rng: Random) -> None:
    snapshot = random_snapshot(rng)
    decisions = policy.plan(snapshot, NOW)
    for law in PROPERTIES.values():
        law(snapshot, decisions)


@pytest.mark.parametrize("name", LIVES)
@settings(max_examples=12, deadline=None)
@given(RANDOM)
def test_every_law_holds_over_many_plans(name: str, rng: Random) -> None:
    LIVES[name](rng)


@pytest.mark.full
@settings(max_examples=5000, deadline=None)
@given(RANDOM)
def test_every_law_holds_for_thousands_of_plans(rng: Random) -> None:
    snapshot = random_snapshot(rng)
    decisions = policy.plan(snapshot, NOW)
    for law in PROPERTIES.values():
        law(snapshot, decisions)


def test_four_runs_do_not_take_each_others_place_for_ever() -> None:
    """One of team 3 took the place of one of team 2, which took that of a larger one of its own team, and so on."""
    LIVES["no_ping_pong"](Random(4747))


@pytest.mark.parametrize("seed", [5122231])
def test_every_law_holds_for_a_plan_that_broke_one(seed: int) -> None:
    snapshot = random_snapshot(Random(seed))
    decisions = policy.plan(snapshot, NOW)
    for law in PROPERTIES.values():
        law(snapshot, decisions)


@pytest.mark.full
@pytest.mark.parametrize("name", LIVES)
@settings(max_examples=250, deadline=None)
@given(RANDOM)
def test_every_law_holds_over_many_plans_hundreds_of_times(name: str, rng: Random) -> None:
    LIVES[name](rng)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_policy_breaks_its_law_and_no_other(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.replacement)
    if not any(broken_laws(mutant.breaks, Random(seed)) == {mutant.breaks} for seed in range(SEEDS)):
        pytest.fail(f"{mutant.breaks} noticed nothing in {SEEDS} draws")


def test_every_law_has_a_broken_policy() -> None:
    assert {mutant.breaks for mutant in MUTANTS} == {*PROPERTIES, *LIVES}

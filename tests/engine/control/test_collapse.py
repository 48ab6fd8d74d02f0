"""Limits of a collapse: consecutive steps beyond them, steps without a value, and the share of repeated n-grams."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import nan
from typing import Any

import numpy as np
import pytest

from oppo_contract.sections.run import Budget
from oppo_core.control.run_score import Health, RunScore
from oppo_core.control.stop_conditions import reason_of_collapse
from oppo_core.reporting.metrics import repetition


def scored(*steps: tuple[float, float, float]) -> RunScore:
    scores = RunScore()
    for step in steps:
        scores.add_step(1.0, Health(*step))
    return scores


GOOD, BAD = (1.0, 2.0, 0.1), (9.0, 0.1, 0.9)
LIMITS = [{"max_kl": 5.0}, {"min_entropy": 1.0}, {"max_repetition": 0.5}]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(
    ("patience", "steps", "ends"),
    [
        (1, [GOOD, BAD], True),
        (1, [BAD, GOOD], False),
        (1, [], False),
        (3, [BAD, BAD], False),
        (3, [BAD, BAD, BAD], True),
        (3, [BAD, BAD, GOOD, BAD, BAD], False),
        (2, [BAD, (nan, nan, nan), BAD], False),
    ],
)
def test_only_consecutive_steps_end_a_run(limit: dict[str, Any], patience: int, steps: list[Any], ends: bool) -> None:
    reason = reason_of_collapse(Budget(**limit, patience=patience), scored(*steps))
    assert (reason is not None) == ends
    if reason is not None:
        assert next(iter(limit)) in reason
        assert ("for 3 steps" in reason) == (patience == 3)


def test_without_limits_nothing_ends() -> None:
    assert reason_of_collapse(Budget(), scored(BAD)) is None


def test_the_count_survives_a_checkpoint() -> None:
    saved = json.loads(json.dumps(asdict(scored(BAD, BAD))))
    restored = RunScore(**saved)
    restored.add_step(1.0, Health(*BAD))
    assert reason_of_collapse(Budget(min_entropy=1.0, patience=3), restored)
    assert all(isinstance(health, Health) for health in restored.recent)
    for _ in range(200):
        restored.add_step(1.0, Health(*GOOD))
    assert len(restored.recent) == 100


SHARES: list[tuple[list[int], float]] = [
    ([], 0.0),
    ([1, 2, 3, 4], 0.0),
    ([1, 2, 3, 4, 5], 0.0),
    ([7] * 8, 1 - 1 / 5),
    ([1, 2, 3, 4, 1, 2, 3, 4], 1 / 5),
    ([4, 3, 2, 1, 2, 3, 4], 0.0),
]


@pytest.mark.parametrize(("tokens", "share"), SHARES)
def test_the_share_of_repeated_4_grams(tokens: list[int], share: float) -> None:
    assert repetition(tokens) == pytest.approx(share)


def test_it_counts_as_sets_of_n_grams_do() -> None:
    tokens = np.random.default_rng(3).integers(0, 3, 500).tolist()
    grams = [tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)]
    assert repetition(tokens) == pytest.approx(1 - len(set(grams)) / len(grams))

"""Removed settings and values: rejected in a new spec, migrated in a stored one."""

from __future__ import annotations

from typing import Any

import pytest

from oppo_contract.retired import RETIRED, drop_unused_settings, replace_retired_settings
from oppo_contract.spec import load_spec, load_stored_spec
from tests.contract.test_bad_input import change, refused

DRAFTER = {"max_rows": 2, "tokens": 4, "match": 2}
USED = {"overlap.drafter": DRAFTER, "rollout.vllm_process": "thread", "ppo.on_nonfinite": "rollback", "training.zero_stage": 3}


def with_drafter(spec: dict[str, Any], drafter: Any) -> dict[str, Any]:
    return spec | {"overlap": {"max_age": 3, "drafter": drafter}}


def test_every_entry_has_an_example() -> None:
    assert USED.keys() == RETIRED.keys()


@pytest.mark.parametrize("path", USED)
def test_a_retired_value_is_refused_with_what_to_do(minimal: dict[str, Any], path: str) -> None:
    (problem,) = refused(change(minimal, path, USED[path]))
    assert (problem.path, problem.message, problem.allowed) == (path, RETIRED[path].message, RETIRED[path].allowed)


@pytest.mark.parametrize("value", [{"max_rows": "many"}, 3, None])
def test_invalid_value_of_a_removed_setting_is_rejected(minimal: dict[str, Any], value: Any) -> None:
    (problem,) = refused(with_drafter(minimal, value))
    assert problem.path == "overlap.drafter"
    assert "delete" in str(problem)


def test_rollback_names_skip_and_raise(minimal: dict[str, Any]) -> None:
    (problem,) = refused(change(minimal, "ppo.on_nonfinite", "rollback"))
    assert "skip" in str(problem)
    assert "raise" in str(problem)


@pytest.mark.parametrize("off", [{}, DRAFTER | {"max_rows": 0}, {"match": 5}])
def test_a_removed_setting_without_effect_is_ignored(minimal: dict[str, Any], off: dict[str, Any]) -> None:
    given = with_drafter(minimal, off)
    assert load_spec(given) == load_spec(minimal | {"overlap": {"max_age": 3}})
    assert given["overlap"]["drafter"] == off, "the data that was given must not change"


def test_a_stored_spec_is_read_without_removed_settings(minimal: dict[str, Any]) -> None:
    stored = with_drafter(minimal, DRAFTER)
    assert load_stored_spec(stored) == load_spec(minimal | {"overlap": {"max_age": 3}})
    assert drop_unused_settings(stored) == stored


def test_a_stored_spec_has_retired_values_replaced(minimal: dict[str, Any]) -> None:
    stored = change(minimal, "ppo.on_nonfinite", "rollback")
    before = repr(stored)
    assert load_stored_spec(stored) == load_spec(change(minimal, "ppo.on_nonfinite", "skip"))
    assert repr(stored) == before
    assert load_stored_spec(minimal) == load_spec(minimal)
    deepspeed = change(minimal, "training.backend", "deepspeed")
    assert load_stored_spec(change(deepspeed, "training.zero_stage", 3)) == load_spec(deepspeed)


@pytest.mark.parametrize("other", [None, [], 3, {"overlap": 3}, {"overlap": None}, {}])
def test_data_that_is_not_a_mapping_is_unchanged(other: Any) -> None:
    assert replace_retired_settings(other) == other
    assert drop_unused_settings(other) == other

"""Values that are gone: a new spec is told what to choose instead, a stored one can be read."""

from __future__ import annotations

from typing import Any

import pytest

from oppo_contract.retired import RETIRED
from oppo_contract.spec import load_spec, load_stored_spec
from tests.contract.test_bad_input import change, refused


@pytest.mark.parametrize(("path", "value"), sorted(RETIRED))
def test_a_retired_value_is_refused_with_what_to_choose_instead(minimal: dict[str, Any], path: str, value: str) -> None:
    (problem,) = refused(change(minimal, path, value))
    assert (problem.path, problem.message) == (path, RETIRED[path, value].message)
    assert problem.value == f'"{value}"'
    assert problem.allowed == RETIRED[path, value].allowed


def test_rollback_names_skip_and_raise(minimal: dict[str, Any]) -> None:
    (problem,) = refused(change(minimal, "ppo.on_nonfinite", "rollback"))
    assert "is gone" in str(problem)
    assert "skip" in str(problem)
    assert "raise" in str(problem)


@pytest.mark.parametrize(("path", "value"), sorted(RETIRED))
def test_a_stored_spec_with_a_retired_value_is_read_as_its_nearest(minimal: dict[str, Any], path: str, value: str) -> None:
    stored = change(minimal, path, value)
    before = repr(stored)
    assert load_stored_spec(stored) == load_spec(change(minimal, path, RETIRED[path, value].read_as))
    assert repr(stored) == before
    assert load_stored_spec(minimal) == load_spec(minimal)

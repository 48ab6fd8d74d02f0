"""Specs stored by commit f5bbdf8, with all defaults, are read; removed settings that are on are rejected."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from oppo_contract import load_spec
from oppo_contract.spec_errors import SpecError

STORED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures" / "f5bbdf8" / "run" / "spec.json").read_text())
# (section, setting, value when off, value when on)
RETIRED = [
    ("overlap", "drafter", {"max_rows": 0, "tokens": 4, "match": 2}, {"max_rows": 5, "tokens": 4, "match": 1}),
    ("ppo", "on_nonfinite", "raise", "rollback"),
]


def stored(section: str, setting: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(STORED)
    data[section][setting] = value
    return data


@pytest.mark.parametrize(("section", "setting", "off", "on"), RETIRED)
def test_a_stored_spec_with_a_retired_setting_that_is_off_is_read(section: str, setting: str, off: Any, on: Any) -> None:
    without = copy.deepcopy(STORED)
    del without[section][setting]
    assert STORED[section][setting] == off
    assert load_spec(STORED) == load_spec(without)


def test_a_spec_that_was_read_is_written_and_read_again() -> None:
    spec = load_spec(STORED)
    assert load_spec(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(("section", "setting", "off", "on"), RETIRED)
def test_a_new_spec_that_switches_on_a_retired_setting_is_refused(section: str, setting: str, off: Any, on: Any) -> None:
    with pytest.raises(SpecError) as refused:
        load_spec(stored(section, setting, on))
    [problem] = refused.value.problems
    assert problem.path == f"{section}.{setting}"
    assert "removed" in str(problem) or "allowed" in str(problem)

"""The API's JSON says the same as the standard library's, for whatever a reply may hold."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from enum import StrEnum
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ninja.renderers import JSONRenderer
from pydantic import BaseModel

from oppo_platform.api.rendering import FastJson


class State(StrEnum):
    RUNNING = "running"


class Place(NamedTuple):
    row: int
    column: int


class Model(BaseModel):
    name: str
    at: datetime


NOON = datetime(2026, 11, 22, 12, 0, 0, 123456, tzinfo=UTC)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
WHOLE = st.integers(-(2**70), 2**70)
REPLIES = st.recursive(
    st.none() | st.booleans() | WHOLE | FINITE | st.text() | st.just(State.RUNNING) | st.datetimes(timezones=st.just(UTC)),
    lambda held: st.lists(held) | st.dictionaries(st.text() | st.integers(0, 99), held) | st.tuples(held, held),
)


def _both(data: Any) -> tuple[Any, Any]:
    fast, plain = (one.render(None, data, response_status=200) for one in (FastJson(), JSONRenderer()))
    return json.loads(fast), json.loads(plain)


@given(REPLIES)
def test_says_what_the_standard_library_says(data: Any) -> None:
    fast, plain = _both(data)
    assert fast == plain


@pytest.mark.parametrize(
    "data",
    [
        {"at": NOON}, {"at": NOON.astimezone(timezone(timedelta(hours=2)))}, [Place(1, 2)], Model(name="a", at=NOON),
        {"state": State.RUNNING, State.RUNNING: 1}, {1: "a", None: "b"}, 2**64, "\ud800",
    ],
    ids=["time", "other zone", "named tuple", "model", "enum", "keys", "large", "surrogate"],
)  # fmt: skip
def test_values_that_orjson_serializes_differently(data: Any) -> None:
    fast, plain = _both(data)
    assert fast == plain


def test_no_number_that_json_has_not() -> None:
    assert FastJson().render(None, [float("nan"), float("inf")], response_status=200) == b"[null,null]"

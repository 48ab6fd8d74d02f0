"""Secrets are removed from lines and events, in every JSON form."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from worker.redaction import Redactor

VALUES = st.text(st.characters(codec="utf-8"), min_size=8, max_size=60)
AROUND = st.text('abc \\n"é', max_size=20)


@given(VALUES, AROUND, AROUND, st.booleans())
def test_secrets_are_removed_and_json_stays_valid(value: str, before: str, after: str, plain: bool) -> None:
    redactor = Redactor({"A_TOKEN": value})
    assert value not in redactor.text(before + value + after)
    line = json.dumps({"lines": [before + value + after]}, ensure_ascii=plain).encode()
    assert value not in json.loads(redactor.event(line))["lines"][0]


def test_nested_values_are_removed() -> None:
    redactor = Redactor({"SHORT_KEY": "abcdefgh", "LONG_KEY": "abcdefghijkl"})
    assert redactor.text("x abcdefghijkl y abcdefgh") == "x [LONG_KEY] y [SHORT_KEY]"


def test_short_lines_of_a_value_are_left_alone() -> None:
    redactor = Redactor({"PEM_KEY": "-----BEGIN\nMIIEvQIBADANB\nend"})
    assert [redactor.text(line) for line in ("the end", "MIIEvQIBADANB")] == ["the end", "[PEM_KEY]"]


def test_without_secrets_nothing_changes() -> None:
    assert Redactor({}).text("a line") == "a line"
    assert Redactor({}).event(b"{}") == b"{}"

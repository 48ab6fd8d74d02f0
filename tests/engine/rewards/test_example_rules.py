"""The rules of examples/smollm2: VADER's sentiment, and arithmetic checked by math-verify."""

from __future__ import annotations

import pytest

from oppo_core.rewards.registry import find_rule
from oppo_core.rewards.rule import RuleReward, rule_parameters

EQUAL = [(7, "3 + 4 = 7"), (7, "The answer is 7."), (7, "\\boxed{7}"), (-1, "It is -1"), (5, "5.0"), ("1/2", "0.5")]
DIFFERENT = [(7, "8"), (7, ""), (7, "seven"), (7, "It was 7 before, now it is 8")]


def test_sentiment_scores_the_response_alone() -> None:
    compound = find_rule("sentiment:compound")
    assert compound("A terrible day.", " It was wonderful, I loved it!") > 0.5
    assert compound("A wonderful day.", " It was terrible, I hated it!") < -0.5
    assert compound("", "") == 0.0


@pytest.mark.parametrize(("answer", "response"), EQUAL)
def test_an_equal_answer_scores_one(answer: object, response: str) -> None:
    assert find_rule("math:verify")("", response, line={"answer": answer}) == 1.0


@pytest.mark.parametrize(("answer", "response"), DIFFERENT)
def test_another_answer_scores_zero(answer: object, response: str) -> None:
    assert find_rule("math:verify")("", response, line={"answer": answer}) == 0.0


@pytest.mark.parametrize(("line", "message"), [({}, "has no `answer`"), ({"answer": ""}, "cannot be parsed")])
def test_a_line_without_a_usable_answer_is_named(line: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_rule("math:verify")("", "7", line=line)


@pytest.mark.parametrize("name", ["sentiment:compound", "math:verify"])
def test_the_engine_accepts_them(name: str) -> None:
    rule = find_rule(name)
    assert set(rule_parameters(name, rule)) <= {"line"}
    RuleReward(name, rule, None)

"""A rule or verifier: a plain function of texts with optional parameters (docs/rewards.md, "Rules")."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.prompt_records import PromptLines
from oppo_core.rewards.protocol import Answer, ScoredAtOnce
from oppo_core.rewards.time_limit import TooLong, at_most

MAY_ASK: dict[str, Callable[[Answer], object]] = {
    "ended": lambda answer: answer.ended,
    "length": lambda answer: len(answer.response_ids),
}
LINE = "line"


class RuleReward(ScoredAtOnce):
    """`rule(prompt, response, …)` on every finished answer."""

    def __init__(self, name: str, rule: Callable[..., Any], lines: PromptLines | None, longest_s: float = 600.0) -> None:
        """`lines`: only for a rule that has the parameter `line` (`asks_for_line`).

        A rule that does not return within `longest_s` seconds has failed (`time_limit.at_most`).

        Raises:
            RewardError: the function has an unknown parameter.
        """
        super().__init__()
        self._name, self._rule, self._lines, self._longest_s = name, rule, lines, longest_s
        self._asked = asked_of(name, rule)

    def start(self, answers: list[Answer], alive: Callable[[], None]) -> None:
        """Score the answers. Raises RewardError when the rule raises, takes too long, or returns no finite number."""
        for answer in answers:
            self._scores[answer.sequence_id] = self._score(answer)
            alive()

    def _score(self, answer: Answer) -> float:
        told = {name: MAY_ASK[name](answer) for name in self._asked if name != LINE}
        if LINE in self._asked:
            assert self._lines is not None
            told[LINE] = self._lines.line(answer.prompt_ids)
        where = f"the rule {self._name}, asked about sequence {answer.sequence_id},"
        try:
            with at_most(self._longest_s):
                score = self._rule(answer.prompt, answer.response, **told)
        except TooLong as late:
            raise RewardError(f"{where} has not returned within {self._longest_s:g} s; it stands in {late.where}") from late
        except Exception as error:
            raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(score, Real):
            raise RewardError(f"{where} returned {score!r:.200}, which is a {type(score).__name__} and no number")
        if not math.isfinite(score):
            raise RewardError(f"{where} returned {float(score)}; a score must be finite")
        return float(score)


def asks_for_line(name: str, rule: Callable[..., Any]) -> bool:
    """Whether the rule has the parameter `line`. Raises RewardError as `RuleReward` does."""
    return LINE in asked_of(name, rule)


def asked_of(name: str, rule: Callable[..., Any]) -> list[str]:
    """The rule's parameters besides prompt and response. Raises RewardError as `RuleReward` does."""
    parameters = list(inspect.signature(rule).parameters.values())
    told = ["prompt", "response"]
    if [p.name for p in parameters[:2]] != told or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise RewardError(f"the rule {name} must take (prompt, response, …), it takes {inspect.signature(rule)}")
    known = [*MAY_ASK, LINE]
    unknown = [p.name for p in parameters[2:] if p.name not in known and p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if unknown:
        raise RewardError(f"the rule {name} asks for {', '.join(unknown)}; a rule may ask for {', '.join(known)}")
    return [p.name for p in parameters[2:] if p.name in known]

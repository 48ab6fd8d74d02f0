"""A rule or verifier: a plain function of texts with optional parameters (docs/rewards.md, "Rules")."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.prompt_records import PromptRecords
from oppo_core.rewards.protocol import Answer, SynchronousReward
from oppo_core.rewards.time_limit import TimeLimitExceeded, time_limit

OPTIONAL_PARAMETERS: dict[str, Callable[[Answer], object]] = {
    "ended": lambda answer: answer.ended,
    "length": lambda answer: len(answer.response_ids),
    "messages": lambda answer: answer.messages,
}
LINE = "line"


class RuleReward(SynchronousReward):
    """`rule(prompt, response, …)` on every finished answer."""

    def __init__(self, name: str, rule: Callable[..., Any], records: PromptRecords | None, longest_s: float = 600.0) -> None:
        """`records`: only for a rule that has the parameter `line` (`needs_line`).

        A rule that does not return within `longest_s` seconds has failed (`time_limit.time_limit`).

        Raises:
            RewardError: the function has an unknown parameter.
        """
        super().__init__()
        self._name, self._rule, self._records, self._longest_s = name, rule, records, longest_s
        self._parameters = rule_parameters(name, rule)

    def start(self, answers: list[Answer], alive: Callable[[], None]) -> None:
        """Score the answers. Raises RewardError when the rule raises, takes too long, or returns no finite number."""
        for answer in answers:
            self._scores[answer.sequence_id] = self._score(answer)
            alive()

    def _score(self, answer: Answer) -> float:
        arguments = {name: OPTIONAL_PARAMETERS[name](answer) for name in self._parameters if name != LINE}
        if LINE in self._parameters:
            assert self._records is not None
            arguments[LINE] = self._records.record(answer.prompt_ids)
        where = f"the rule {self._name}, for sequence {answer.sequence_id},"
        try:
            with time_limit(self._longest_s):
                score = self._rule(answer.prompt, answer.response, **arguments)
        except TimeLimitExceeded as late:
            raise RewardError(f"{where} has not returned within {self._longest_s:g} s; it was in {late.where}") from late
        except Exception as error:
            raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(score, Real):
            raise RewardError(f"{where} returned {score!r:.200}, a {type(score).__name__}, not a number")
        if not math.isfinite(score):
            raise RewardError(f"{where} returned {float(score)}; a score must be finite")
        return float(score)


def needs_line(name: str, rule: Callable[..., Any]) -> bool:
    """Whether the rule has the parameter `line`. Raises RewardError as `RuleReward` does."""
    return LINE in rule_parameters(name, rule)


def rule_parameters(name: str, rule: Callable[..., Any]) -> list[str]:
    """The rule's parameters besides prompt and response. Raises RewardError as `RuleReward` does."""
    parameters = list(inspect.signature(rule).parameters.values())
    if [p.name for p in parameters[:2]] != ["prompt", "response"] or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise RewardError(f"the rule {name} must take (prompt, response, …), it takes {inspect.signature(rule)}")
    known = [*OPTIONAL_PARAMETERS, LINE]
    unknown = [p.name for p in parameters[2:] if p.name not in known and p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if unknown:
        raise RewardError(f"the rule {name} has the unknown parameters {', '.join(unknown)}; a rule may have {', '.join(known)}")
    return [p.name for p in parameters[2:] if p.name in known]

"""The next state of a run after the end of an attempt: a pure function of the outcome, the run's state and its retry policy.

Rules match fixed words, case-insensitively, each as a whole. They are deliberately no regular expressions: a user's pattern would
run inside a transaction that holds the run's lock, and Python's `re` can take exponential time; a search for fixed parts is
linear. The searched text is bounded as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from oppo_contract.sections.run import LogRule
from oppo_contract.states import RunState

LAST_LINES = 50
LONGEST_LINE = 2000
LONGEST_BACKOFF_S = 3600.0
# Outcomes that count against the number of attempts.
DIED = ("engine_died", "lease_lost", "orphaned", "absent", "failed")
# `restored` does not count: the platform was restored to a time before the attempt's end.
# Deaths caused by the node: the run retries without a delay.
NODES_FAULT = ("lease_lost", "orphaned", "absent")
S = RunState


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A run's `retries`, with the platform's default number of attempts."""

    attempts: int
    backoff_s: float
    rules: tuple[LogRule, ...]


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """The end of an attempt. `deaths`: of the run so far, this one included if it is one."""

    outcome: str
    reason: str
    lines: Sequence[str]
    deaths: int
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The run's next state, the reason, the delay in seconds, and whether its node is excluded from now on."""

    state: RunState
    why: str
    wait_s: float = 0.0
    exclude_node: bool = False


def verdict(ended: AttemptEnd, state: str, stop_reason: str, policy: RetryPolicy, resumes: str) -> Verdict:
    """The run's next state after the end of an attempt in its current `state`.

    `stop_reason`: of the stop request, if the run is stopping. `resumes`: the start of the next attempt, a sentence.
    """
    if ended.outcome == "succeeded":
        return Verdict(S.SUCCEEDED, ended.reason or "Succeeded.")
    died = ended.outcome in DIED
    rule = first_rule(policy.rules, [ended.reason, *ended.lines]) if died and ended.outcome not in NODES_FAULT else None
    if ended.outcome == "failed" and (rule is None or rule.action == "fail"):
        return Verdict(S.FAILED, ended.reason or "Failed.")
    if state == S.CANCELLING:  # the request decides, however the engine ended
        return Verdict(S.CANCELLED, stop_reason)
    if died:
        return _after_death(ended, state, stop_reason, policy, resumes, rule)
    if state == S.PAUSING:  # for any reason, including its node's shutdown
        return Verdict(S.PAUSED, f"{stop_reason} {resumes}")
    return Verdict(S.QUEUED, f"{_sentence(ended.reason) or 'Stopped by its worker.'} {resumes}")


def _sentence(reason: str) -> str:
    return reason if not reason or reason.endswith((".", "!", "?")) else f"{reason}."


def _after_death(
    ended: AttemptEnd, state: str, stop_reason: str, policy: RetryPolicy, resumes: str, rule: LogRule | None
) -> Verdict:
    cause = _cause(ended)
    if rule is not None and rule.action == "fail":
        return Verdict(S.FAILED, f"{cause}. Not retried: retry rule “{rule.match}”.")
    exclude = rule is not None and rule.action == "exclude_node"
    if ended.deaths >= policy.attempts:
        return Verdict(S.FAILED, f"{cause}. No attempts left ({ended.deaths} of {policy.attempts}).", exclude_node=exclude)
    elsewhere = f" Retry rule “{rule.match}” excludes that node." if rule is not None and exclude else ""
    if state == S.PAUSING:
        return Verdict(S.PAUSED, f"{stop_reason} {cause} while it was pausing. {resumes}{elsewhere}", exclude_node=exclude)
    wait_s = 0.0 if ended.outcome in NODES_FAULT else backoff_s(policy.backoff_s, ended.deaths)
    when = f"starts after {wait_s:g} s." if wait_s else "is next."
    next_one = f"Attempt {ended.deaths + 1} of {policy.attempts} {when}"
    return Verdict(S.QUEUED, f"{cause}. {resumes} {next_one}{elsewhere}", wait_s, exclude)


def _cause(ended: AttemptEnd) -> str:
    if ended.outcome in NODES_FAULT:
        return ended.reason
    code = f" (exit status {ended.exit_code})" if ended.exit_code is not None else ""
    verb = "failed" if ended.outcome == "failed" else "died"
    return f"The engine {verb}{code}: {ended.reason}".rstrip(":. ")


def backoff_s(first_s: float, deaths: int) -> float:
    """The delay after the n-th death: `first_s`, doubled each time, at most an hour."""
    return min(LONGEST_BACKOFF_S, first_s * 2.0 ** min(deaths - 1, 32))


def first_rule(rules: Sequence[LogRule], lines: Sequence[str]) -> LogRule | None:
    """The first rule whose words are in one of the lines; only the last lines, and the beginning of each, are searched."""
    seen = [line[:LONGEST_LINE] for line in (*lines[:1], *lines[1:][-LAST_LINES:])]
    return next((rule for rule in rules if any(_says(line, rule.match) for line in seen)), None)


def _says(line: str, words: str) -> bool:
    at = 0
    for part in filter(None, (part.strip() for part in words.split("*"))):
        result = re.compile(rf"(?<!\w){re.escape(part)}(?!\w)", re.IGNORECASE).search(line, at)
        if result is None:
            return False
        at = result.end()
    return True

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
FIRST_NODE_BACKOFF_S, LONGEST_NODE_BACKOFF_S = 5.0, 600.0
# Outcomes that count against `retries.attempts`.
ENGINE_DIED = ("engine_died", "failed")
# The infrastructure ended the attempt. These count apart, against OPPO_MAX_NODE_FAILURES, until a checkpoint shows progress.
NODE_FAILED = ("node_failed", "lease_lost", "orphaned", "absent")
# Others count against nothing. `restored`: the platform was restored to a time before the attempt's end.
DIED = (*ENGINE_DIED, *NODE_FAILED)
S = RunState


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A run's `retries`, with the platform's default number of attempts and its limit of node failures."""

    attempts: int
    node_failures: int
    backoff_s: float
    rules: tuple[LogRule, ...]


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """The end of an attempt.

    deaths: attempts of the run that died so far, by the engine or by their node as this one did; this one included.
    """

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
    rule = first_rule(policy.rules, [ended.reason, *ended.lines]) if ended.outcome in ENGINE_DIED else None
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
    by_node = ended.outcome in NODE_FAILED
    if by_node and ended.deaths >= policy.node_failures:
        return Verdict(S.FAILED, f"{cause}. {ended.deaths} node failures without a new checkpoint; see OPPO_MAX_NODE_FAILURES.")
    if not by_node and ended.deaths >= policy.attempts:
        return Verdict(S.FAILED, f"{cause}. No attempts left ({ended.deaths} of {policy.attempts}).", exclude_node=exclude)
    elsewhere = f" Retry rule “{rule.match}” excludes that node." if rule is not None and exclude else ""
    if state == S.PAUSING:
        return Verdict(S.PAUSED, f"{stop_reason} {cause} while it was pausing. {resumes}{elsewhere}", exclude_node=exclude)
    if by_node:
        wait_s = node_backoff_s(ended.deaths)
        again = f" Waits {wait_s:g} s after {ended.deaths} node failures without a new checkpoint." if wait_s else ""
        return Verdict(S.QUEUED, f"{cause}. {resumes}{again}", wait_s)
    wait_s = backoff_s(policy.backoff_s, ended.deaths)
    when = f"starts after {wait_s:g} s." if wait_s else "is next."
    next_one = f"Attempt {ended.deaths + 1} of {policy.attempts} {when}"
    return Verdict(S.QUEUED, f"{cause}. {resumes} {next_one}{elsewhere}", wait_s, exclude)


def _cause(ended: AttemptEnd) -> str:
    if ended.outcome in NODE_FAILED:
        return ended.reason.rstrip(". ")
    code = f" (exit status {ended.exit_code})" if ended.exit_code is not None else ""
    verb = "failed" if ended.outcome == "failed" else "died"
    return f"The engine {verb}{code}: {ended.reason}".rstrip(":. ")


def backoff_s(first_s: float, deaths: int, longest_s: float = LONGEST_BACKOFF_S) -> float:
    """The delay after the n-th death: `first_s`, doubled each time, at most `longest_s`."""
    return min(longest_s, first_s * 2.0 ** min(deaths - 1, 32))


def node_backoff_s(failures: int) -> float:
    """The delay after the n-th failure of nodes without progress: none after the first, then 5 s, doubled, at most 10 minutes."""
    return backoff_s(FIRST_NODE_BACKOFF_S, failures - 1, LONGEST_NODE_BACKOFF_S) if failures > 1 else 0.0


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

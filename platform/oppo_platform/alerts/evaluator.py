"""Evaluates the alert rules of runs in every housekeeping round. Concurrent housekeepers are safe.

    runs that hold devices ──▶ measure new steps ──▶ verdicts ──▶ open, close        (state between rounds: `Watch`)
    runs that have ended ──▶ close open alerts, announce the end                    (`Ending`: deleted in the same
    transaction)

Guarantees: an evaluation counts only if no other was stored since (compare-and-set on `Watch.looks`), so each step enters the
reward's memory once; alerts open and close under the run's lock and never for an ended run; an end is announced exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import F, QuerySet, Value
from django.db.models.functions import Least

from oppo_contract.states import ENDED, HOLDING_DEVICES, RunState
from oppo_platform import clock
from oppo_platform.alerts import policy, titles
from oppo_platform.alerts.lifecycle import close_alert, close_all, joined, open_alert
from oppo_platform.alerts.measurements import Measured, as_stored, measure
from oppo_platform.alerts.models import Alert, Ending, Silence, Watch
from oppo_platform.alerts.policy import OF_WORK, Condition, Rule
from oppo_platform.alerts.rules import Rules, rules_by_team, team_rules
from oppo_platform.runs.models import Run

RUNS_A_READING = 50
ENDINGS_A_ROUND = 500
NOT_FINITE_ERROR = "NonFiniteError"  # prefix of the engine's last message when a value was NaN or infinite


@dataclass(frozen=True, slots=True)
class Finding:
    """Result for one condition."""

    condition: Condition
    verdict: policy.Verdict
    why: str
    value: float | None
    threshold: float | None


def evaluate_runs(away: timedelta | None = None) -> int:
    """One round. Returns the number of alerts opened or closed.

    Args:
        away: seconds without a running housekeeper, which do not count as a run's silence: workers may not have
        reached us either.
    """
    if away is not None and away.total_seconds() > settings.OPPO_DOWNTIME_S + settings.OPPO_HOUSEKEEPING_S:
        # Never into the future: two housekeepers may report the same absence.
        Watch.objects.update(silent_since=Least(F("silent_since") + away, Value(clock.now())))
    now = clock.now()
    changes = _close_without_devices()
    runs = list(_watched_runs())
    rules = rules_by_team({run.project.team_id for run in runs})
    for at in range(0, len(runs), RUNS_A_READING):
        changes += _evaluate(runs[at : at + RUNS_A_READING], rules, now)
    for run_id in Ending.objects.order_by("run_id").values_list("run_id", flat=True)[:ENDINGS_A_ROUND]:
        changes += announce_end(run_id)
    return changes


def _watched_runs() -> QuerySet[Run]:
    """Runs that hold devices, each with its watch, which is created if missing."""
    holding = Run.objects.filter(state__in=HOLDING_DEVICES)
    new = holding.filter(watch=None).values_list("pk", flat=True)
    now = clock.now()
    Watch.objects.bulk_create([Watch(run_id=run_id, epoch=0, step=0, silent_since=now) for run_id in new], ignore_conflicts=True)
    return joined(holding).select_related("watch").filter(watch__isnull=False).order_by("pk")


def _evaluate(runs: Sequence[Run], rules: Mapping[int, Rules], now: datetime) -> int:
    """Evaluate runs and act. Returns the number of alerts opened or closed."""
    fresh = [run for run in runs if (run.step, run.epochs) != (run.watch.step, run.watch.epoch)]
    measured = measure(fresh, rules)
    open_now = _open_of(runs)
    changes = 0
    for run in runs:
        seen = _next_state(run, measured.get(run.pk), moved=run in fresh, now=now)
        result = _findings(run, seen, measured.get(run.pk), rules[run.project.team_id], open_now[run.pk], now)
        if result or seen != _current_state(run.watch):
            changes += _apply(run, seen, result)
    return changes


def _open_of(runs: Sequence[Run]) -> dict[int, set[Condition]]:
    result: dict[int, set[Condition]] = {run.pk: set() for run in runs}
    for run_id, condition in Alert.objects.filter(run__in=result, closed_at=None).values_list("run_id", "condition"):
        result[run_id].add(Condition(condition))
    return result


def _current_state(watch: Watch) -> dict[str, object]:
    return {name: getattr(watch, name) for name in ("epoch", "step", "silent_since", "reward", "reward_step", "reward_epoch")}


def _next_state(run: Run, measured: Measured | None, *, moved: bool, now: datetime) -> dict[str, object]:
    """The watch after this evaluation."""
    seen = _current_state(run.watch)
    if moved or run.state != RunState.RUNNING:
        seen |= {"epoch": run.epochs, "step": run.step, "silent_since": now}
    if measured is not None:
        reward_state = {"reward": as_stored(measured.reward), "reward_step": measured.reward_step, "reward_epoch": measured.epoch}
        seen |= reward_state
    return seen


def _findings(
    run: Run, seen: Mapping[str, object], measured: Measured | None, rules: Rules, is_open: set[Condition], now: datetime
) -> list[Finding]:
    """Alerts to open or close."""
    result = [_stalled(run, seen, rules[Condition.STALLED], Condition.STALLED in is_open, now)]
    if measured is not None:
        result += _step_findings(run, measured, rules, is_open)
    return [
        finding for finding in result if finding.verdict == "close" or (finding.verdict == "open" and rules[finding.condition].on)
    ]


def _stalled(run: Run, seen: Mapping[str, object], rule: Rule, is_open: bool, now: datetime) -> Finding:
    since = seen["silent_since"]
    assert isinstance(since, datetime)
    # Of this attempt's own steps: the time of loading and the first step says nothing about later ones.
    pace_s = run.elapsed_s / run.step if run.step and seen["reward_epoch"] == run.epochs else None
    limit_s, silent_s = policy.stall_limit_s(rule, pace_s), (now - since).total_seconds()
    verdict: policy.Verdict = policy.stalled(is_open, silent_s, limit_s)
    if run.state != RunState.RUNNING:
        verdict = "close" if is_open else "keep"
    why = titles.why_stalled(silent_s, run.step, pace_s) if verdict == "open" else _over(run)
    return Finding(Condition.STALLED, verdict, why, silent_s / 60, limit_s / 60)


def _over(run: Run) -> str:
    return f"Step {run.step} arrived." if run.state == RunState.RUNNING else f"The run is {run.state}."


def _step_findings(run: Run, measured: Measured, rules: Rules, is_open: set[Condition]) -> list[Finding]:
    """Findings from the newest steps."""
    c = Condition
    kl, bubble, reward, finite = (rules[name] for name in (c.KL_ABOVE, c.BUBBLE_ABOVE, c.REWARD_COLLAPSED, c.NOT_FINITE))
    fall = policy.measure_fall(measured.reward, reward.window_steps or 1).share
    last_at = measured.unfinite[0] if measured.unfinite else None
    return [
        _above(c.KL_ABOVE, c.KL_ABOVE in is_open, measured.kl, kl, titles.why_kl),
        _above(c.BUBBLE_ABOVE, c.BUBBLE_ABOVE in is_open, measured.bubble, bubble, titles.why_bubble),
        Finding(
            c.REWARD_COLLAPSED,
            verdict := policy.collapsed(c.REWARD_COLLAPSED in is_open, measured.reward, reward),
            titles.why_collapsed(measured.reward, fall or 0.0)
            if verdict == "open"
            else f"It rose to {measured.reward.level:.4g} again.",
            fall,
            reward.threshold,
        ),
        Finding(
            c.NOT_FINITE,
            policy.unfinite(c.NOT_FINITE in is_open, last_at, run.step, finite),
            measured.unfinite[1] if measured.unfinite else f"All values were finite for {finite.window_steps} steps.",
            None,
            None,
        ),
    ]


def _above(condition: Condition, is_open: bool, value: float | None, rule: Rule, why: titles.Sentence) -> Finding:
    threshold = rule.threshold or 0.0
    verdict = policy.crossed(is_open, value, threshold, policy.SLACK[condition])
    reward_state = why(value, rule) if verdict == "open" and value is not None else f"It fell to {value or 0:.4g}."
    return Finding(condition, verdict, reward_state, value, threshold)


@transaction.atomic
def _apply(run: Run, seen: Mapping[str, object], findings: Sequence[Finding]) -> int:
    """Store the evaluation, unless another was stored since, and open and close alerts. Returns the number of changes."""
    if findings:
        state = Run.objects.select_for_update().filter(pk=run.pk).values_list("state", flat=True).first()
        if state is None or state in ENDED:
            return 0
    if not Watch.objects.filter(pk=run.pk, looks=run.watch.looks).update(looks=F("looks") + 1, **seen):
        return 0
    silent = Silence.objects.filter(run=run).exists()
    changes = 0
    for finding in findings:
        if finding.verdict == "close":
            changes += close_alert(run, finding.condition, finding.why) is not None
        elif not silent:
            changes += open_alert(run, finding.condition, finding.why, finding.value, finding.threshold) is not None
    return changes


def _close_without_devices() -> int:
    """Close alerts about work of runs that no longer hold devices."""
    idle = Alert.objects.filter(closed_at=None, condition__in=OF_WORK).exclude(run__state__in=HOLDING_DEVICES)
    changes = 0
    for run_id in set(idle.values_list("run_id", flat=True)):
        with transaction.atomic():
            run = joined(Run.objects.select_for_update(of=("self",))).get(pk=run_id)
            if run.state not in HOLDING_DEVICES:
                changes += sum(close_alert(run, condition, f"The run is {run.state}.") is not None for condition in OF_WORK)
    return changes


@transaction.atomic
def announce_end(run_id: int) -> int:
    """Close the open alerts of an ended run, and announce its end. Returns the number of changes; 0 if that was done before."""
    run = joined(Run.objects.select_for_update(of=("self",))).filter(pk=run_id).first()
    if run is None or not Ending.objects.filter(pk=run_id).delete()[0]:
        return 0
    Watch.objects.filter(pk=run_id).delete()
    rules = team_rules(run.project.team_id)
    changes = 0
    if run.deleted_at is None and not Silence.objects.filter(run=run).exists():
        changes += sum(open_alert(run, condition, why) is not None for condition, why in _endings(run) if rules[condition].on)
    return changes + close_all(run, f"The run has {'ended' if run.state == RunState.CANCELLED else run.state}.")


def _endings(run: Run) -> list[tuple[Condition, str]]:
    why = run.error or run.reason
    if run.state == RunState.SUCCEEDED:
        return [(Condition.FINISHED, f"{_sentence(run.reason or 'succeeded')} {run.step} of {run.total_steps} steps.")]
    if run.state != RunState.FAILED:
        return []
    broken = [(Condition.NOT_FINITE, why)] if NOT_FINITE_ERROR in why else []
    return [*broken, (Condition.FAILED, why or "The run failed without an error message.")]


def _sentence(words: str) -> str:
    """An engine's reason as a sentence."""
    return words[:1].upper() + words[1:].rstrip(".") + "."

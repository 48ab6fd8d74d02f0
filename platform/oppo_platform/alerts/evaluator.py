"""Looking after runs: what the housekeeper does for alerts in every round. Two housekeepers at once are harmless.

    runs that hold devices ──▶ measure what is new ──▶ verdicts ──▶ open, close        (`Watch`: what is remembered)
    runs that have ended ──▶ close what is open, tell the end                          (`Ending`: told in one transaction)

Guarantees: a look counts only if nobody else has looked since (compare-and-set on `Watch.looks`), so that a step enters the
reward's memory once; alerts are opened and closed under the run's lock and never for a run that has ended; an end is told exactly
once.
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
from oppo_platform.alerts.rules import Rules, rules_of, rules_of_teams
from oppo_platform.runs.models import Run

RUNS_A_READING = 50
ENDINGS_A_ROUND = 500
NOT_FINITE_ERROR = "NonFiniteError"  # how the engine's last word begins when a value was NaN or infinite


@dataclass(frozen=True, slots=True)
class Finding:
    """What a look found about one condition."""

    condition: Condition
    verdict: policy.Verdict
    why: str
    value: float | None
    threshold: float | None


def look_after_runs(away: timedelta | None = None) -> int:
    """One round. Returns how many alerts were opened or closed.

    Args:
        away: how long no housekeeper was at work. That is nobody's silence: workers may not have reached us either.
    """
    if away is not None and away.total_seconds() > settings.OPPO_DOWNTIME_S + settings.OPPO_HOUSEKEEPING_S:
        # Never into the future: two housekeepers may tell the same absence.
        Watch.objects.update(silent_since=Least(F("silent_since") + away, Value(clock.now())))
    now = clock.now()
    changes = _let_go()
    runs = list(_watched())
    rules = rules_of_teams({run.project.team_id for run in runs})
    for at in range(0, len(runs), RUNS_A_READING):
        changes += _look(runs[at : at + RUNS_A_READING], rules, now)
    for run_id in Ending.objects.order_by("run_id").values_list("run_id", flat=True)[:ENDINGS_A_ROUND]:
        changes += tell_ending(run_id)
    return changes


def _watched() -> QuerySet[Run]:
    """Runs that hold devices, each with its watch, which is made when it is missing."""
    holding = Run.objects.filter(state__in=HOLDING_DEVICES)
    new = holding.filter(watch=None).values_list("pk", flat=True)
    now = clock.now()
    Watch.objects.bulk_create([Watch(run_id=run_id, epoch=0, step=0, silent_since=now) for run_id in new], ignore_conflicts=True)
    return joined(holding).select_related("watch").filter(watch__isnull=False).order_by("pk")


def _look(runs: Sequence[Run], rules: Mapping[int, Rules], now: datetime) -> int:
    """Look at some runs and act. Returns how many alerts were opened or closed."""
    fresh = [run for run in runs if (run.step, run.epochs) != (run.watch.step, run.watch.epoch)]
    measured = measure(fresh, rules)
    open_now = _open_of(runs)
    changes = 0
    for run in runs:
        seen = _seen(run, measured.get(run.pk), moved=run in fresh, now=now)
        found = _findings(run, seen, measured.get(run.pk), rules[run.project.team_id], open_now[run.pk], now)
        if found or seen != _kept(run.watch):
            changes += _act(run, seen, found)
    return changes


def _open_of(runs: Sequence[Run]) -> dict[int, set[Condition]]:
    found: dict[int, set[Condition]] = {run.pk: set() for run in runs}
    for run_id, condition in Alert.objects.filter(run__in=found, closed_at=None).values_list("run_id", "condition"):
        found[run_id].add(Condition(condition))
    return found


def _kept(watch: Watch) -> dict[str, object]:
    return {name: getattr(watch, name) for name in ("epoch", "step", "silent_since", "reward", "reward_step", "reward_epoch")}


def _seen(run: Run, measured: Measured | None, *, moved: bool, now: datetime) -> dict[str, object]:
    """What the watch remembers after this look."""
    seen = _kept(run.watch)
    if moved or run.state != RunState.RUNNING:
        seen |= {"epoch": run.epochs, "step": run.step, "silent_since": now}
    if measured is not None:
        told = {"reward": as_stored(measured.reward), "reward_step": measured.reward_step, "reward_epoch": measured.epoch}
        seen |= told
    return seen


def _findings(
    run: Run, seen: Mapping[str, object], measured: Measured | None, rules: Rules, is_open: set[Condition], now: datetime
) -> list[Finding]:
    """Alerts to open or close."""
    found = [_stalled(run, seen, rules[Condition.STALLED], Condition.STALLED in is_open, now)]
    if measured is not None:
        found += _of_steps(run, measured, rules, is_open)
    return [
        finding for finding in found if finding.verdict == "close" or (finding.verdict == "open" and rules[finding.condition].on)
    ]


def _stalled(run: Run, seen: Mapping[str, object], rule: Rule, is_open: bool, now: datetime) -> Finding:
    since = seen["silent_since"]
    assert isinstance(since, datetime)
    # Of this attempt's own steps: how long loading and the first step take says nothing about the rest.
    pace_s = run.elapsed_s / run.step if run.step and seen["reward_epoch"] == run.epochs else None
    limit_s, silent_s = policy.stall_limit_s(rule, pace_s), (now - since).total_seconds()
    verdict: policy.Verdict = policy.stalled(is_open, silent_s, limit_s)
    if run.state != RunState.RUNNING:
        verdict = "close" if is_open else "keep"
    why = titles.why_stalled(silent_s, run.step, pace_s) if verdict == "open" else _over(run)
    return Finding(Condition.STALLED, verdict, why, silent_s / 60, limit_s / 60)


def _over(run: Run) -> str:
    return f"Step {run.step} arrived." if run.state == RunState.RUNNING else f"The run is {run.state}."


def _of_steps(run: Run, measured: Measured, rules: Rules, is_open: set[Condition]) -> list[Finding]:
    """What the newest steps say."""
    c = Condition
    kl, bubble, reward, finite = (rules[name] for name in (c.KL_ABOVE, c.BUBBLE_ABOVE, c.REWARD_COLLAPSED, c.NOT_FINITE))
    fall = policy.fall_of(measured.reward, reward.window_steps or 1).share
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
    told = why(value, rule) if verdict == "open" and value is not None else f"It fell to {value or 0:.4g}."
    return Finding(condition, verdict, told, value, threshold)


@transaction.atomic
def _act(run: Run, seen: Mapping[str, object], found: Sequence[Finding]) -> int:
    """Keep the look, unless somebody else has looked since, and open and close. Returns how many alerts changed."""
    if found:
        state = Run.objects.select_for_update().filter(pk=run.pk).values_list("state", flat=True).first()
        if state is None or state in ENDED:
            return 0
    if not Watch.objects.filter(pk=run.pk, looks=run.watch.looks).update(looks=F("looks") + 1, **seen):
        return 0
    silent = Silence.objects.filter(run=run).exists()
    changes = 0
    for finding in found:
        if finding.verdict == "close":
            changes += close_alert(run, finding.condition, finding.why) is not None
        elif not silent:
            changes += open_alert(run, finding.condition, finding.why, finding.value, finding.threshold) is not None
    return changes


def _let_go() -> int:
    """Close what is about work of runs that hold devices no more: they wait, or are paused."""
    idle = Alert.objects.filter(closed_at=None, condition__in=OF_WORK).exclude(run__state__in=HOLDING_DEVICES)
    changes = 0
    for run_id in set(idle.values_list("run_id", flat=True)):
        with transaction.atomic():
            run = joined(Run.objects.select_for_update(of=("self",))).get(pk=run_id)
            if run.state not in HOLDING_DEVICES:
                changes += sum(close_alert(run, condition, f"The run is {run.state}.") is not None for condition in OF_WORK)
    return changes


@transaction.atomic
def tell_ending(run_id: int) -> int:
    """Close what is open of a run that has ended, and tell how it ended. Returns how many alerts changed; 0 if that was done."""
    run = joined(Run.objects.select_for_update(of=("self",))).filter(pk=run_id).first()
    if run is None or not Ending.objects.filter(pk=run_id).delete()[0]:
        return 0
    Watch.objects.filter(pk=run_id).delete()
    rules = rules_of(run.project.team_id)
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
    """An engine's reason is a few words; beside others it is a sentence."""
    return words[:1].upper() + words[1:].rstrip(".") + "."

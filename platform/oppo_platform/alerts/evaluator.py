"""Evaluates alert rules in each housekeeping round. Concurrent housekeepers are harmless.

    runs that hold devices ──▶ measure new steps ──▶ verdicts ──▶ open, close alerts    (state of a run: `Watch`)
    runs that have ended ──▶ close open alerts, announce the end                        (pending announcements: `Ending`)

Guarantees: an evaluation is stored only if no other one was stored since (compare-and-set on `Watch.looks`), so that each step is
counted once; alerts open and close under the run's lock, and not after the run's end; an end is announced exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import F, QuerySet, Value
from django.db.models.functions import Least

from oppo_contract.states import ENDED, HOLDING_DEVICES, RunState
from oppo_platform import clock
from oppo_platform.alerts import policy, titles
from oppo_platform.alerts.lifecycle import close_alert, close_all, open_alert, with_related
from oppo_platform.alerts.measurements import Measurements, measure
from oppo_platform.alerts.models import Alert, Ending, Silence, Watch
from oppo_platform.alerts.policy import DEVICE_CONDITIONS, Condition, Rule
from oppo_platform.alerts.rules import Rules, rules_by_team, team_rules
from oppo_platform.runs.models import Run

RUNS_PER_READ = 50
ENDINGS_PER_ROUND = 500
NOT_FINITE_ERROR = "NonFiniteError"  # begins the engine's error message if a value was NaN or infinite


@dataclass(frozen=True, slots=True)
class Finding:
    """The evaluation of one condition."""

    condition: Condition
    verdict: policy.Verdict
    why: str
    value: float | None
    threshold: float | None


def evaluate_runs(away: timedelta | None = None) -> int:
    """One round. Returns the number of alerts opened or closed.

    Args:
        away: time without a housekeeper. It does not count as stalled: workers may not have reached the platform either.
    """
    if away is not None and away.total_seconds() > settings.OPPO_DOWNTIME_S + settings.OPPO_HOUSEKEEPING_S:
        # Not into the future: two housekeepers may report the same downtime.
        Watch.objects.update(silent_since=Least(F("silent_since") + away, Value(clock.now())))
    now = clock.now()
    changes = _close_without_devices()
    runs = list(_watched_runs())
    rules = rules_by_team({run.project.team_id for run in runs})
    for at in range(0, len(runs), RUNS_PER_READ):
        changes += _evaluate(runs[at : at + RUNS_PER_READ], rules, now)
    for run_id in Ending.objects.order_by("run_id").values_list("run_id", flat=True)[:ENDINGS_PER_ROUND]:
        changes += announce_end(run_id)
    return changes


def _watched_runs() -> QuerySet[Run]:
    """Runs that hold devices, each with its `Watch`, created if missing."""
    holding = Run.objects.filter(state__in=HOLDING_DEVICES)
    new = holding.filter(watch=None).values_list("pk", flat=True)
    now = clock.now()
    Watch.objects.bulk_create([Watch(run_id=run_id, epoch=0, step=0, silent_since=now) for run_id in new], ignore_conflicts=True)
    return with_related(holding).select_related("watch").filter(watch__isnull=False).order_by("pk")


def _evaluate(runs: Sequence[Run], rules: Mapping[int, Rules], now: datetime) -> int:
    """Evaluate the rules of some runs. Returns the number of alerts opened or closed."""
    fresh = [run for run in runs if (run.step, run.epochs) != (run.watch.step, run.watch.epoch)]
    measured = measure(fresh, rules)
    open_now: dict[int, set[Condition]] = {run.pk: set() for run in runs}
    for run_id, condition in Alert.objects.filter(run__in=open_now, closed_at=None).values_list("run_id", "condition"):
        open_now[run_id].add(Condition(condition))
    changes = 0
    for run in runs:
        state = _new_state(run, measured.get(run.pk), moved=run in fresh, now=now)
        findings = _findings(run, state, measured.get(run.pk), rules[run.project.team_id], open_now[run.pk], now)
        if findings or state != _stored_state(run.watch):
            changes += _store(run, state, findings)
    return changes


def _stored_state(watch: Watch) -> dict[str, object]:
    return {name: getattr(watch, name) for name in ("epoch", "step", "silent_since", "reward", "reward_step", "reward_epoch")}


def _new_state(run: Run, measured: Measurements | None, *, moved: bool, now: datetime) -> dict[str, object]:
    """Fields of the run's `Watch` after this evaluation."""
    state = _stored_state(run.watch)
    if moved or run.state != RunState.RUNNING:
        state |= {"epoch": run.epochs, "step": run.step, "silent_since": now}
    if measured is not None:
        state |= {"reward": asdict(measured.reward), "reward_step": measured.reward_step, "reward_epoch": measured.epoch}
    return state


def _findings(
    run: Run, state: Mapping[str, object], measured: Measurements | None, rules: Rules, is_open: set[Condition], now: datetime
) -> list[Finding]:
    """Alerts to open or close."""
    findings = [_stalled(run, state, rules[Condition.STALLED], Condition.STALLED in is_open, now)]
    if measured is not None:
        findings += _step_findings(run, measured, rules, is_open)
    return [f for f in findings if f.verdict == "close" or (f.verdict == "open" and rules[f.condition].on)]


def _stalled(run: Run, state: Mapping[str, object], rule: Rule, is_open: bool, now: datetime) -> Finding:
    since = state["silent_since"]
    assert isinstance(since, datetime)
    # Unknown before the attempt's own first step: loading and the first step take longer than the others.
    pace_s = run.elapsed_s / run.step if run.step and state["reward_epoch"] == run.epochs else None
    limit_s, silent_s = policy.stall_limit_s(rule, pace_s), (now - since).total_seconds()
    verdict: policy.Verdict = policy.stalled(is_open, silent_s, limit_s)
    if run.state != RunState.RUNNING:
        verdict = "close" if is_open else "keep"
    if verdict == "open":
        why = titles.why_stalled(silent_s, run.step, pace_s)
    else:
        why = f"Step {run.step} arrived." if run.state == RunState.RUNNING else f"The run is {run.state}."
    return Finding(Condition.STALLED, verdict, why, silent_s / 60, limit_s / 60)


def _step_findings(run: Run, measured: Measurements, rules: Rules, is_open: set[Condition]) -> list[Finding]:
    """Findings about the newest steps."""
    c = Condition
    kl, bubble, reward, finite = (rules[name] for name in (c.KL_ABOVE, c.BUBBLE_ABOVE, c.REWARD_COLLAPSED, c.NOT_FINITE))
    drop = policy.reward_drop(measured.reward, reward.window_steps or 1).share
    last_at = measured.nonfinite[0] if measured.nonfinite else None
    return [
        _above(c.KL_ABOVE, c.KL_ABOVE in is_open, measured.kl, kl, titles.why_kl),
        _above(c.BUBBLE_ABOVE, c.BUBBLE_ABOVE in is_open, measured.bubble, bubble, titles.why_bubble),
        Finding(
            c.REWARD_COLLAPSED,
            verdict := policy.collapsed(c.REWARD_COLLAPSED in is_open, measured.reward, reward),
            titles.why_collapsed(measured.reward, drop or 0.0)
            if verdict == "open"
            else f"It rose to {measured.reward.level:.4g} again.",
            drop,
            reward.threshold,
        ),
        Finding(
            c.NOT_FINITE,
            policy.nonfinite(c.NOT_FINITE in is_open, last_at, run.step, finite),
            measured.nonfinite[1] if measured.nonfinite else f"All values were finite for {finite.window_steps} steps.",
            None,
            None,
        ),
    ]


def _above(condition: Condition, is_open: bool, value: float | None, rule: Rule, why: titles.Sentence) -> Finding:
    threshold = rule.threshold or 0.0
    verdict = policy.crossed(is_open, value, threshold, policy.SLACK[condition])
    text = why(value, rule) if verdict == "open" and value is not None else f"It fell to {value or 0:.4g}."
    return Finding(condition, verdict, text, value, threshold)


@transaction.atomic
def _store(run: Run, state: Mapping[str, object], findings: Sequence[Finding]) -> int:
    """Store the evaluation unless another one was stored since, open and close alerts. Returns the number of changed alerts."""
    if findings:
        run_state = Run.objects.select_for_update().filter(pk=run.pk).values_list("state", flat=True).first()
        if run_state is None or run_state in ENDED:
            return 0
    if not Watch.objects.filter(pk=run.pk, looks=run.watch.looks).update(looks=F("looks") + 1, **state):
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
    """Close alerts about device use of runs that hold no devices any more: queued or paused runs."""
    idle = Alert.objects.filter(closed_at=None, condition__in=DEVICE_CONDITIONS).exclude(run__state__in=HOLDING_DEVICES)
    changes = 0
    for run_id in set(idle.values_list("run_id", flat=True)):
        with transaction.atomic():
            run = with_related(Run.objects.select_for_update(of=("self",))).get(pk=run_id)
            if run.state not in HOLDING_DEVICES:
                closed = [close_alert(run, condition, f"The run is {run.state}.") for condition in DEVICE_CONDITIONS]
                changes += sum(alert is not None for alert in closed)
    return changes


@transaction.atomic
def announce_end(run_id: int) -> int:
    """Close the alerts of an ended run and announce its end. Returns the number of changed alerts; 0 if already done."""
    run = with_related(Run.objects.select_for_update(of=("self",))).filter(pk=run_id).first()
    if run is None or not Ending.objects.filter(pk=run_id).delete()[0]:
        return 0
    Watch.objects.filter(pk=run_id).delete()
    rules = team_rules(run.project.team_id)
    changes = 0
    if run.deleted_at is None and not Silence.objects.filter(run=run).exists():
        changes += sum(open_alert(run, condition, why) is not None for condition, why in _endings(run) if rules[condition].on)
    return changes + close_all(run, f"The run has {'ended' if run.state == RunState.CANCELLED else run.state}.")


def announce_node_failure(run_id: int, why: str) -> None:
    """Announce that a node ended an attempt of the run, whose lock the caller holds, and that the run continues."""
    run = with_related(Run.objects.all()).get(pk=run_id)
    if team_rules(run.project.team_id)[Condition.NODE_FAILED].on and not Silence.objects.filter(run=run).exists():
        open_alert(run, Condition.NODE_FAILED, why)


def _endings(run: Run) -> list[tuple[Condition, str]]:
    why = run.error or run.reason
    if run.state == RunState.SUCCEEDED:
        reason = run.reason or "succeeded"
        return [(Condition.FINISHED, f"{reason[:1].upper()}{reason[1:].rstrip('.')}. {run.step} of {run.total_steps} steps.")]
    if run.state != RunState.FAILED:
        return []
    broken = [(Condition.NOT_FINITE, why)] if NOT_FINITE_ERROR in why else []
    return [*broken, (Condition.FAILED, why or "The run failed without an error message.")]

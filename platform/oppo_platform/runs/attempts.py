"""The life of an attempt: claim, heartbeat, checkpoint, outcome, fence. What workers ask for, decided here.

Guarantees: an attempt is claimed once, by the node it was allocated to; devices are released in the transaction that ends it;
a call under an old epoch, or for an attempt that has ended, changes nothing and is told so (`AttemptRefused`). The checks here
serve the answer; what is relied on are compare-and-sets (`_write`) and triggers (migration `0003_fencing`).
Lock order, everywhere: run, attempt, allocation.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

from django.conf import settings
from django.db import transaction

from oppo_contract import wire
from oppo_contract.spec import PLATFORM_SECTIONS, Retries
from oppo_contract.states import RunState
from oppo_platform import clock
from oppo_platform.accounts.team_secrets import SecretUnavailable, delivered_secrets
from oppo_platform.cluster.models import Device, DeviceState, Node
from oppo_platform.runs.endings import DIED, Ended, RetryPolicy, verdict
from oppo_platform.runs.models import LIVE_ATTEMPT, Attempt, AttemptState, Checkpoint, Run
from oppo_platform.runs.transitions import move_run
from oppo_platform.scheduling.models import Allocation
from oppo_platform.tokens import new_token

Why = Literal["stale_epoch", "already_claimed", "not_your_node", "ended", "lease_lost", "unknown_checkpoint"]
# What a run that is being stopped tells its supervisor.
SIGNALS: dict[str, Literal["cancel", "pause", "preempt"]] = {
    RunState.CANCELLING: "cancel",
    RunState.PAUSING: "pause",
    RunState.PREEMPTING: "preempt",
}


class AttemptRefused(Exception):
    """Decided elsewhere; final for this call."""

    def __init__(self, reason: Why, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


def claim(node: Node, attempt_id: int, epoch: int) -> wire.Claimed:
    """Hand the attempt to its node, once. Raises `AttemptRefused` for anybody else and ever after.

    A run whose secrets are gone cannot start: it fails, and nobody gets it.
    """
    try:
        return _claim(node, attempt_id, epoch)
    except SecretUnavailable as error:
        _fail_unclaimed(attempt_id, epoch, str(error))
        raise AttemptRefused("ended", str(error)) from None


@transaction.atomic
def _claim(node: Node, attempt_id: int, epoch: int) -> wire.Claimed:
    run, attempt = _locked(attempt_id)
    if attempt.node_id != node.pk:
        raise AttemptRefused("not_your_node", f"Attempt {attempt_id} is not allocated to node {node.name}.")
    if attempt.epoch != epoch:
        raise AttemptRefused("stale_epoch", f"Attempt {attempt_id} has epoch {attempt.epoch}, not {epoch}.")
    if attempt.state != AttemptState.ALLOCATED:
        _refuse_ended(attempt)
        raise AttemptRefused("already_claimed", f"Attempt {attempt_id} has been claimed already.")
    token, now = new_token("attempt"), clock.now()
    lease_ends = now + timedelta(seconds=settings.OPPO_LEASE_S)
    _write(
        attempt, epoch, state=AttemptState.CLAIMED, token_prefix=token.prefix, token_digest=token.digest, claimed_at=now,
        seen_at=now, lease_expires_at=lease_ends,
    )  # fmt: skip
    move_run(run, RunState.STARTING, f"Starts on node {node.name}.", f"node:{node.name}")
    return _claimed(run, attempt, token.text, delivered_secrets(run, f"node:{node.name}"))


@transaction.atomic
def _fail_unclaimed(attempt_id: int, epoch: int, why: str) -> None:
    run, attempt = _locked(attempt_id)
    if attempt.state == AttemptState.ALLOCATED and attempt.epoch == epoch:
        end_attempt(attempt, AttemptState.ENDED, "failed", why)
        move_run(run, RunState.FAILED, why, "scheduler")


def _claimed(run: Run, attempt: Attempt, token: str, secrets: dict[str, str]) -> wire.Claimed:
    held = Device.objects.filter(allocations__attempt=attempt, allocations__released_at__isnull=True)
    saved = attempt.resume_from
    return wire.Claimed(
        attempt_token=token,
        run_id=run.pk,
        spec={name: section for name, section in run.spec.items() if name not in PLATFORM_SECTIONS},
        device_indices=list(held.order_by("index").values_list("index", flat=True)),
        lease_s=settings.OPPO_LEASE_S,
        artifact_url=artifact_url(run.pk),
        resume_from=wire.CheckpointRef(step=saved.step, url=saved.url, manifest_sha256=saved.manifest_sha256) if saved else None,
        secrets=secrets,
    )


def artifact_url(run_id: int) -> str:
    """The folder of a run's artifacts."""
    return f"{settings.OPPO_ARTIFACT_ROOT}/runs/{run_id}"


@transaction.atomic
def heartbeat(attempt_id: int, beat: wire.AttemptHeartbeat) -> wire.AttemptOrders:
    """Renew the lease; the first beat with `running` moves the run to running. Carries what the run's state asks for."""
    run, attempt = _held(attempt_id, beat.epoch)
    now = clock.now()
    begins = beat.running and attempt.state == AttemptState.CLAIMED
    state = AttemptState.RUNNING if begins else attempt.state
    _write(attempt, beat.epoch, state=state, seen_at=now, lease_expires_at=_renewed(attempt, now))
    if begins and run.state == RunState.STARTING:
        move_run(run, RunState.RUNNING, f"Trains on node {attempt.node.name}.", f"node:{attempt.node.name}")
    lease_s = (attempt.lease_expires_at - now).total_seconds()
    signal = SIGNALS.get(run.state)
    if signal is None or attempt.stop_by is None:
        return wire.AttemptOrders(lease_s=lease_s)
    left_s = max(0.0, (attempt.stop_by - now).total_seconds())
    return wire.AttemptOrders(lease_s=lease_s, signal=signal, deadline_s=left_s)


def _renewed(attempt: Attempt, now: datetime) -> datetime:
    """Until when a heartbeat renews the lease: past the deadline of a wish it does not, so that the lease decides in the end."""
    asked_to_stop = attempt.stop_by is not None and attempt.stop_by <= now
    return attempt.lease_expires_at if asked_to_stop else now + timedelta(seconds=settings.OPPO_LEASE_S)


@transaction.atomic
def register_checkpoint(attempt_id: int, told: wire.CheckpointRegistration) -> None:
    """From now on the run resumes from here. Told again, nothing changes; of two at the same step the one told last counts.

    A run that stops in the middle of a step has two: the one on schedule, and one with the half-done step after it. An attempt
    that lost its lease may still register what it wrote, as long as its epoch is the newest and the run waits: that saves work
    after an outage, and the next attempt, which begins under the run's lock, cannot miss it.
    """
    run, attempt = _locked(attempt_id)
    newest, waits = attempt.epoch == run.epochs, run.state in (RunState.QUEUED, RunState.PAUSED)
    if not (attempt.state == AttemptState.FENCED and newest and waits):
        _refuse_ended(attempt)
    _refuse_epoch(attempt, told.epoch)
    inside = told.url.startswith(artifact_url(run.pk) + "/") and ".." not in told.url.split("/")
    if not inside or told.step < attempt.start_step:
        raise AttemptRefused("unknown_checkpoint", f"{told.url} is not a checkpoint of run {run.pk}.")
    Checkpoint.objects.update_or_create(
        attempt=attempt,
        step=told.step,
        defaults={
            "run": run,
            "url": told.url,
            "manifest_sha256": told.manifest_sha256,
            "bytes": told.bytes,
            "registered_at": clock.now(),
        },
    )


@transaction.atomic
def finish(attempt_id: int, told: wire.Outcome) -> None:
    """The engine has ended: free the devices and move the run on. The same outcome told again changes nothing."""
    run, attempt = _locked(attempt_id)
    if attempt.state == AttemptState.ENDED and attempt.outcome == told.outcome and attempt.epoch == told.epoch:
        return
    _refuse_ended(attempt)
    _refuse_epoch(attempt, told.epoch)
    end_attempt(attempt, AttemptState.ENDED, told.outcome, told.reason, told.exit_code)
    run.last_log_lines = told.last_log_lines
    run.save(update_fields=["last_log_lines"])
    _move_on(run, attempt, told.reason, told.last_log_lines, f"node:{attempt.node.name}")


def _move_on(run: Run, attempt: Attempt, reason: str, lines: Sequence[str], actor: str) -> None:
    """What the end of an attempt means for its run; `endings.verdict` decides."""
    deaths = Attempt.objects.filter(run=run, outcome__in=DIED).count()
    ended = Ended(attempt.outcome, reason, lines, deaths, attempt.exit_code)
    after = verdict(ended, run.state, run.reason, retry_policy(run), resume_words(run))
    run.not_before = clock.now() + timedelta(seconds=after.wait_s) if after.wait_s else None
    if after.exclude_node and attempt.node_id not in run.excluded_nodes:
        run.excluded_nodes = [*run.excluded_nodes, attempt.node_id]
    run.save(update_fields=["not_before", "excluded_nodes"])
    move_run(run, after.state, after.why, actor)


def retry_policy(run: Run) -> RetryPolicy:
    """The spec's retries; a run of before they existed has the defaults."""
    told = Retries.model_validate(run.spec.get("retries", {}))
    return RetryPolicy(told.attempts or settings.OPPO_MAX_ATTEMPTS, told.backoff_s, tuple(told.rules))


def resume_words(run: Run) -> str:
    """Where the next attempt begins, as a sentence."""
    saved = latest_checkpoint(run)
    return f"Resumes from step {saved.step}." if saved else "Starts again from step 0."


def latest_checkpoint(run: Run) -> Checkpoint | None:
    """The checkpoint that the next attempt resumes from."""
    return Checkpoint.objects.filter(run=run).order_by("-step", "-id").first()


def end_attempt(attempt: Attempt, state: AttemptState, outcome: str, reason: str, exit_code: int | None = None) -> None:
    """End it and release its devices; the run's row is locked by the caller. Raises `AttemptRefused` when it has ended."""
    now = clock.now()
    _write(attempt, attempt.epoch, state=state, outcome=outcome, reason=reason, ended_at=now, exit_code=exit_code)
    Allocation.objects.filter(attempt=attempt, released_at__isnull=True).update(released_at=now)


def fence(attempt_id: int, outcome: Literal["lease_lost", "orphaned"], cause: str, actor: str, devices: DeviceState) -> bool:
    """Take the run away from a silent attempt. Its devices become `devices` (unknown: not given away until reported empty).

    An attempt that nobody had claimed left nothing on them. Returns whether it was still live. Call inside a transaction.
    """
    run, attempt = _locked(attempt_id)
    if not attempt.live:
        return False
    claimed = attempt.state != AttemptState.ALLOCATED
    if claimed:
        held = Device.objects.filter(allocations__attempt=attempt, allocations__released_at__isnull=True)
        held.exclude(state__in=(DeviceState.GONE, DeviceState.QUARANTINED)).update(state=devices)
    end_attempt(attempt, AttemptState.FENCED, outcome if claimed else "unclaimed", cause)
    if claimed:
        _move_on(run, attempt, cause, (), actor)
    else:
        move_run(run, RunState.QUEUED, f"{cause}. Nothing was lost.", actor)
    return True


def _write(attempt: Attempt, epoch: int, **values: Any) -> None:
    """Write to a live attempt under its epoch: a compare-and-set, whose row count decides, whatever was checked before.

    Raises:
        AttemptRefused: it has ended, or the epoch is another.
    """
    written = Attempt.objects.filter(pk=attempt.pk, epoch=epoch, state__in=LIVE_ATTEMPT).update(**values)
    if not written:
        raise AttemptRefused("stale_epoch", f"Attempt {attempt.pk} is not live under epoch {epoch}.")
    for name, value in values.items():
        setattr(attempt, name, value)


def _locked(attempt_id: int) -> tuple[Run, Attempt]:
    """The attempt under its run's lock. Raises `AttemptRefused` when there is no such attempt."""
    run = Run.objects.select_for_update(of=("self",)).filter(attempts=attempt_id).first()
    if run is None:
        raise AttemptRefused("not_your_node", f"There is no attempt {attempt_id}.")
    return run, Attempt.objects.select_for_update(of=("self",)).select_related("node", "resume_from").get(pk=attempt_id)


def _held(attempt_id: int, epoch: int) -> tuple[Run, Attempt]:
    """The attempt under its run's lock, provided that it still holds the run."""
    run, attempt = _locked(attempt_id)
    _refuse_ended(attempt)
    _refuse_epoch(attempt, epoch)
    return run, attempt


def _refuse_ended(attempt: Attempt) -> None:
    if attempt.state == AttemptState.FENCED:
        raise AttemptRefused("lease_lost", f"Attempt {attempt.pk} was given up: {attempt.reason}")
    if attempt.state not in LIVE_ATTEMPT:
        raise AttemptRefused("ended", f"Attempt {attempt.pk} has ended ({attempt.outcome}).")


def _refuse_epoch(attempt: Attempt, epoch: int) -> None:
    if attempt.epoch != epoch:
        raise AttemptRefused("stale_epoch", f"Attempt {attempt.pk} has epoch {attempt.epoch}, not {epoch}.")

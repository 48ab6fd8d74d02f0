"""The life of an attempt: claim, heartbeat, checkpoint, outcome, fence. Handles the workers' requests.

Guarantees: an attempt is claimed once, by the node it was allocated to; devices are released in the transaction that ends it;
a call with an old epoch, or for an ended attempt, changes nothing and raises `AttemptRefused`. The checks here serve the error
message; correctness relies on compare-and-sets (`_write`) and triggers (migration `0003_fencing`).
An attempt on several nodes has a launch for each further one (`launches`), which sends its rank. The head's end, or the first
failure of any node, ends the attempt and moves the run, once; other nodes learn it and stop.
Lock order, everywhere: run, attempt, launch, allocation.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

from django.conf import settings
from django.db import transaction
from django.db.models import Max
from pydantic import ValidationError

from oppo_contract import wire
from oppo_contract.retired import replace_retired_settings
from oppo_contract.sections.secrets import secret_names
from oppo_contract.spec import PLATFORM_SECTIONS, Retries
from oppo_contract.spec_versions import spec_for_version
from oppo_contract.states import ENDED, RunState
from oppo_platform import clock
from oppo_platform.accounts.team_secrets import SecretUnavailable, delivered_secrets
from oppo_platform.cluster.models import Device, DeviceState, Node
from oppo_platform.notify import wake_scheduler
from oppo_platform.runs.launches import (
    build_rendezvous,
    claim_launch,
    claimed_nodes,
    end_launch,
    end_launches,
    head_address,
    lock_claimed_launch,
    renew_launch,
)
from oppo_platform.runs.models import LIVE_ATTEMPT, Allocation, Attempt, AttemptState, Checkpoint, Launch, LaunchState, Run
from oppo_platform.runs.resume_sources import pinned_for_forks, starting_runs
from oppo_platform.runs.retry_decision import DIED, ENGINE_DIED, NODE_FAILED, AttemptEnd, RetryPolicy, verdict
from oppo_platform.runs.transitions import ON_NODE_FAILED, AttemptRefused, move_run
from oppo_platform.tokens import new_token

# Order to the supervisor of a run that is stopping.
SIGNALS: dict[str, Literal["cancel", "pause", "preempt"]] = {
    RunState.CANCELLING: "cancel",
    RunState.PAUSING: "pause",
    RunState.PREEMPTING: "preempt",
}


class CheckpointGone(Exception):
    """The checkpoint of a fork is gone: starting at step 0 would be another run."""


def claim(node: Node, attempt_id: int, epoch: int, address: wire.Address | None = None) -> wire.Claimed:
    """Assign the attempt, or one of its launches, to its node, once. Raises `AttemptRefused` otherwise.

    A run whose secrets or whose fork's checkpoint are gone cannot start: it fails. `address`: for engines of other nodes.
    """
    try:
        return _claim(node, attempt_id, epoch, address)
    except (SecretUnavailable, CheckpointGone) as error:
        _fail_unclaimed(attempt_id, epoch, str(error))
        raise AttemptRefused("ended", str(error)) from None


@transaction.atomic
def _claim(node: Node, attempt_id: int, epoch: int, address: wire.Address | None) -> wire.Claimed:
    run, attempt = _locked(attempt_id)
    if attempt.node_id != node.pk and attempt.nodes == 1:
        raise AttemptRefused("not_your_node", f"Attempt {attempt_id} is not allocated to node {node.name}.")
    if attempt.epoch != epoch:
        raise AttemptRefused("stale_epoch", f"Attempt {attempt_id} has epoch {attempt.epoch}, not {epoch}.")
    if attempt.node_id != node.pk:
        _refuse_ended(attempt)
        launch, text = claim_launch(attempt, node, clock.now())
        return _claimed(run, attempt, text, node, launch.rank)
    if attempt.state == AttemptState.ALLOCATED and run.forked_run is not None and attempt.resume_from is None:
        raise CheckpointGone(f"The checkpoint of run {run.forked_run} that this run starts from has been deleted.")
    if attempt.state != AttemptState.ALLOCATED:
        _refuse_ended(attempt)
        raise AttemptRefused("already_claimed", f"Attempt {attempt_id} is already claimed.")
    token, now = new_token("attempt"), clock.now()
    lease_ends = now + timedelta(seconds=settings.OPPO_LEASE_S)
    _write(
        attempt, epoch, state=AttemptState.CLAIMED, token_prefix=token.prefix, token_digest=token.digest, claimed_at=now,
        seen_at=now, lease_expires_at=lease_ends, **head_address(attempt, address, now),
    )  # fmt: skip
    waits = {1: "", 2: " The other node follows."}.get(attempt.nodes, f" The other {attempt.nodes - 1} nodes follow.")
    move_run(run, RunState.STARTING, f"Starts on node {node.name}.{waits}", f"node:{node.name}")
    if attempt.nodes > 1:
        wake_scheduler()  # it sends the orders of the others
    return _claimed(run, attempt, token.text, node)


@transaction.atomic
def _fail_unclaimed(attempt_id: int, epoch: int, why: str) -> None:
    run, attempt = _locked(attempt_id)
    if attempt.state == AttemptState.ALLOCATED and attempt.epoch == epoch:
        end_attempt(attempt, AttemptState.ENDED, "failed", why)
        move_run(run, RunState.FAILED, why, "scheduler")


def _claimed(run: Run, attempt: Attempt, token: str, node: Node, rank: int = 0) -> wire.Claimed:
    held = Device.objects.filter(node=node, allocations__attempt=attempt, allocations__released_at__isnull=True)
    saved, requested = attempt.resume_from, secret_names(run.spec.get("secrets") or {})
    spec = spec_for_version(replace_retired_settings(run.spec), node.wire_version)
    return wire.Claimed(
        attempt_token=token,
        run_id=run.pk,
        spec={name: section for name, section in spec.items() if name not in PLATFORM_SECTIONS},
        device_indices=list(held.order_by("index").values_list("index", flat=True)),
        lease_s=settings.OPPO_LEASE_S,
        artifact_url=artifact_url(run.pk),
        resume_from=wire.CheckpointRef(step=saved.step, url=saved.url, manifest_sha256=saved.manifest_sha256) if saved else None,
        rendezvous=build_rendezvous(attempt, rank, clock.now()),
        secrets=delivered_secrets(run.project.team_id, requested, run.pk, f"node:{node.name}"),
    )


def artifact_url(run_id: int) -> str:
    """URL of the folder of a run's artifacts."""
    return f"{settings.OPPO_ARTIFACT_ROOT}/runs/{run_id}"


@transaction.atomic
def heartbeat(attempt_id: int, beat: wire.AttemptHeartbeat, rank: int = 0) -> wire.AttemptOrders:
    """Renew the lease; the head's first beat with `running` moves the run to running. Returns orders from the run's state."""
    run, attempt = _locked(attempt_id)
    _refuse_ended(attempt)
    _refuse_epoch(attempt, beat.epoch)
    now = clock.now()
    if rank:
        launch = lock_claimed_launch(attempt, rank)
        renew_launch(launch, now, _renewed(attempt, launch.lease_expires_at, now))
        return _orders(run, attempt, launch.lease_expires_at, now)
    begins = beat.running and attempt.state == AttemptState.CLAIMED
    state = AttemptState.RUNNING if begins else attempt.state
    _write(attempt, beat.epoch, state=state, seen_at=now, lease_expires_at=_renewed(attempt, attempt.lease_expires_at, now))
    if begins and run.state == RunState.STARTING:
        move_run(run, RunState.RUNNING, f"Trains on {node_names(attempt)}.", f"node:{attempt.node.name}")
    return _orders(run, attempt, attempt.lease_expires_at, now)


def node_names(attempt: Attempt) -> str:
    """`node_text` of the attempt's nodes, the head first."""
    others = attempt.launches.order_by("rank").values_list("node__name", flat=True) if attempt.nodes > 1 else ()
    return node_text([attempt.node.name, *others])


def node_text(names: Sequence[str]) -> str:
    """`node a` or `nodes a, b`."""
    return f"node{'s' * (len(names) > 1)} {', '.join(names)}"


def _orders(run: Run, attempt: Attempt, lease_ends: datetime | None, now: datetime) -> wire.AttemptOrders:
    lease_s = (lease_ends - now).total_seconds() if lease_ends is not None else 0.0
    signal, spare = SIGNALS.get(run.state), pinned_for_forks(run)
    if signal is None or attempt.stop_by is None:
        return wire.AttemptOrders(lease_s=lease_s, spare=spare)
    left_s = max(0.0, (attempt.stop_by - now).total_seconds())
    return wire.AttemptOrders(lease_s=lease_s, signal=signal, deadline_s=left_s, spare=spare)


def _renewed(attempt: Attempt, lease_ends: datetime | None, now: datetime) -> datetime:
    """New end of the lease: not beyond the deadline of a stop request, after which the lease decides."""
    asked_to_stop = attempt.stop_by is not None and attempt.stop_by <= now
    return lease_ends if asked_to_stop and lease_ends is not None else now + timedelta(seconds=settings.OPPO_LEASE_S)


@transaction.atomic
def register_checkpoint(attempt_id: int, checkpoint: wire.CheckpointRegistration, rank: int = 0) -> None:
    """Register a checkpoint from which the run resumes; idempotent. Of two at the same step the later registration counts.

    A run that stops within a step has two: the scheduled one, and one with the unfinished step after it. An attempt that lost its
    lease may still register its checkpoint while its epoch is the newest and the run waits: that saves work after an outage, and
    the next attempt, which begins under the run's lock, uses it.
    """
    run, attempt = _locked(attempt_id)
    newest, waits = attempt.epoch == run.epochs, run.state in (RunState.QUEUED, RunState.PAUSED)
    if not (attempt.state == AttemptState.FENCED and newest and waits):
        _refuse_ended(attempt)
    _refuse_epoch(attempt, checkpoint.epoch)
    if rank:
        detail = f"Checkpoints of attempt {attempt_id} can only be registered by its first node."
        raise AttemptRefused("unknown_checkpoint", detail)
    inside = checkpoint.url.startswith(artifact_url(run.pk) + "/") and ".." not in checkpoint.url.split("/")
    if not inside or checkpoint.step < attempt.start_step:
        raise AttemptRefused("unknown_checkpoint", f"{checkpoint.url} is not a checkpoint of run {run.pk}.")
    saved, _ = Checkpoint.objects.update_or_create(
        attempt=attempt,
        step=checkpoint.step,
        defaults={
            "run": run,
            "registered_at": clock.now(),
            **checkpoint.model_dump(include={"url", "manifest_sha256", "bytes"}),
        },
    )
    # A folder that was rewritten invalidates its previous registration. One that a fork waits for stays, to fail with its name.
    before = Checkpoint.objects.filter(run=run, url=checkpoint.url).exclude(pk__in=[saved.pk, attempt.resume_from_id or saved.pk])
    before.exclude(pk__in=starting_runs().values("begins_with")).delete()


@transaction.atomic
def finish(attempt_id: int, outcome: wire.Outcome, rank: int = 0) -> None:
    """The engine has ended: free the devices and move the run on. Repeating the same outcome changes nothing."""
    run, attempt = _locked(attempt_id)
    if rank:
        _finish_launch(run, attempt, outcome, rank)
        return
    if attempt.state == AttemptState.ENDED and attempt.outcome == outcome.outcome and attempt.epoch == outcome.epoch:
        return
    _refuse_ended(attempt)
    _refuse_epoch(attempt, outcome.epoch)
    _end_with_outcome(run, attempt, outcome, attempt.node, outcome.reason)


def _finish_launch(run: Run, attempt: Attempt, outcome: wire.Outcome, rank: int) -> None:
    """A further node's engine has ended. After a success the head's outcome decides; anything else ends the attempt."""
    reported = Launch.objects.filter(attempt=attempt, rank=rank, state=LaunchState.ENDED, outcome=outcome.outcome)
    if attempt.epoch == outcome.epoch and reported.exists():
        return
    _refuse_ended(attempt)
    _refuse_epoch(attempt, outcome.epoch)
    launch = lock_claimed_launch(attempt, rank)
    end_launch(launch, outcome)
    if outcome.exit_code != 0 or outcome.outcome in DIED:
        _end_with_outcome(run, attempt, outcome, launch.node, f"on node {launch.node.name}, {outcome.reason}")


def _end_with_outcome(run: Run, attempt: Attempt, outcome: wire.Outcome, node: Node, reason: str) -> None:
    """End the attempt by the outcome that one of its nodes reports."""
    end_attempt(attempt, AttemptState.ENDED, outcome.outcome, reason, outcome.exit_code, reporter=node.pk)
    run.last_log_lines = outcome.last_log_lines
    run.save(update_fields=["last_log_lines"])
    _move_on(run, attempt, node.pk, reason, outcome.last_log_lines, f"node:{node.name}")


def _move_on(run: Run, attempt: Attempt, node_id: int, reason: str, lines: Sequence[str], actor: str) -> None:
    """Move the run after the end of an attempt; `retry_decision.verdict` decides."""
    ended = AttemptEnd(attempt.outcome, reason, lines, _deaths(run, attempt.outcome), attempt.exit_code)
    after = verdict(ended, run.state, run.reason, build_retry_policy(run), describe_resume(run))
    run.not_before = clock.now() + timedelta(seconds=after.wait_s) if after.wait_s else None
    if after.exclude_node and node_id not in run.excluded_nodes:
        run.excluded_nodes = [*run.excluded_nodes, node_id]
    run.save(update_fields=["not_before", "excluded_nodes"])
    move_run(run, after.state, after.why, actor)
    if attempt.outcome == "node_failed" and after.state not in ENDED:
        for hook in ON_NODE_FAILED:
            hook(run.pk, after.why)


def _deaths(run: Run, outcome: str) -> int:
    """Attempts that died as this one did, since a user's retry; by their nodes only since the newest checkpoint's attempt."""
    attempts = Attempt.objects.filter(run=run, epoch__gt=run.retried_after)
    if outcome not in NODE_FAILED:
        return attempts.filter(outcome__in=ENGINE_DIED).count()
    progress = Checkpoint.objects.filter(run=run).aggregate(epoch=Max("attempt__epoch"))["epoch"] or 0
    return attempts.filter(outcome__in=NODE_FAILED, epoch__gte=progress).count()


def build_retry_policy(run: Run) -> RetryPolicy:
    """The spec's retries; a run from before they existed, or from before stricter validation, has the defaults."""
    try:
        retries = Retries.model_validate(run.spec.get("retries", {}))
    except ValidationError:  # otherwise its end could never be processed
        retries = Retries()
    attempts = retries.attempts or settings.OPPO_MAX_ATTEMPTS
    return RetryPolicy(attempts, settings.OPPO_MAX_NODE_FAILURES, retries.backoff_s, tuple(retries.rules))


def describe_resume(run: Run) -> str:
    """The start of the next attempt, as a sentence."""
    saved = latest_checkpoint(run)
    if saved is None:
        return "Restarts from step 0."
    return (
        f"Resumes from step {saved.step}." if saved.run_id == run.pk else f"Starts from step {saved.step} of run {saved.run_id}."
    )


def latest_checkpoint(run: Run) -> Checkpoint | None:
    """The checkpoint from which the next attempt resumes: the newest, or the one that a user chose."""
    own = Checkpoint.objects.filter(run=run).order_by("-step", "-id")
    if run.begins_with_id is not None:
        own = own.filter(attempt__epoch__gt=run.begins_after)
    return own.first() or run.begins_with


def end_attempt(
    attempt: Attempt, state: AttemptState, outcome: str, reason: str, exit_code: int | None = None, reporter: int | None = None
) -> None:
    """End an attempt (its run locked) with its launches and release its devices. Raises `AttemptRefused` when it has ended.

    `state`: ended or fenced. `reporter`: the node that reported the end of its engine; other nodes' devices become unknown.
    """
    now, silent = clock.now(), claimed_nodes(attempt) - {reporter}
    _write(attempt, attempt.epoch, state=state, outcome=outcome, reason=reason, ended_at=now, exit_code=exit_code)
    end_launches(attempt, silent, now)
    Allocation.objects.filter(attempt=attempt, released_at__isnull=True).update(released_at=now)


def fence(
    attempt_id: int,
    outcome: Literal["lease_lost", "orphaned", "absent", "restored"],
    cause: str,
    actor: str,
    devices: DeviceState,
    node_id: int | None = None,
) -> bool:
    """Fence a silent attempt. Its devices become `devices` (unknown: not assigned until reported empty).

    An unclaimed attempt left no process on them. Returns whether it was still live. Call inside a transaction.
    `cause`: a sentence without its full stop. `node_id`: the silent node, by default the head; devices of other nodes with an
    engine become unknown.
    """
    run, attempt = _locked(attempt_id)
    if not attempt.live:
        return False
    claimed = attempt.state != AttemptState.ALLOCATED
    about = attempt.node_id if node_id is None else node_id
    if about in claimed_nodes(attempt):
        held = Device.objects.filter(node=about, allocations__attempt=attempt, allocations__released_at__isnull=True)
        held.exclude(state__in=(DeviceState.GONE, DeviceState.QUARANTINED)).update(state=devices)
    end_attempt(attempt, AttemptState.FENCED, outcome if claimed else "unclaimed", cause, reporter=about)
    if claimed:
        _move_on(run, attempt, about, cause, (), actor)
    else:
        move_run(run, RunState.QUEUED, f"{cause}. No progress was lost.", actor)
    return True


def _write(attempt: Attempt, epoch: int, **values: Any) -> None:
    """Write to a live attempt under its epoch: a compare-and-set, whose row count decides.

    Raises:
        AttemptRefused: it has ended, or the epoch is another.
    """
    written = Attempt.objects.filter(pk=attempt.pk, epoch=epoch, state__in=LIVE_ATTEMPT).update(**values)
    if not written:
        raise AttemptRefused("stale_epoch", f"Attempt {attempt.pk} is not active with epoch {epoch}.")
    for name, value in values.items():
        setattr(attempt, name, value)


def _locked(attempt_id: int) -> tuple[Run, Attempt]:
    """The attempt under its run's lock. Raises `AttemptRefused` when there is no such attempt."""
    run = Run.objects.select_for_update(of=("self",)).filter(attempts=attempt_id).first()
    if run is None:
        raise AttemptRefused("not_your_node", f"There is no attempt {attempt_id}.")
    return run, Attempt.objects.select_for_update(of=("self",)).select_related("node", "resume_from").get(pk=attempt_id)


def _refuse_ended(attempt: Attempt) -> None:
    if attempt.state == AttemptState.FENCED:
        raise AttemptRefused("lease_lost", f"Attempt {attempt.pk} was fenced: {attempt.reason}")
    if attempt.state not in LIVE_ATTEMPT:
        raise AttemptRefused("ended", f"Attempt {attempt.pk} has ended ({attempt.outcome}).")


def _refuse_epoch(attempt: Attempt, epoch: int) -> None:
    if attempt.epoch != epoch:
        raise AttemptRefused("stale_epoch", f"Attempt {attempt.pk} has epoch {attempt.epoch}, not {epoch}.")

"""Launch orders, shares and quotas of teams, and reasons of waiting runs."""

from __future__ import annotations

from django.db import models
from django.db.models import Q


class Dispatch(models.Model):
    """The outbox of launch orders: written with the allocation, sent after the commit, sent again while unclaimed."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="dispatches")
    launch = models.OneToOneField("runs.Launch", null=True, on_delete=models.CASCADE, related_name="dispatch")
    queue = models.CharField(max_length=160)
    created_at = models.DateTimeField()
    sent_at = models.DateTimeField(null=True)
    sends = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["attempt", "queue"], name="one_order_a_node")]


class SchedulerBeat(models.Model):
    """One row: the time of the last cycle, to extend leases by the scheduler's own downtime; and the queue's order."""

    last_cycle_at = models.DateTimeField()
    order = models.JSONField(default=list, help_text="Ids of waiting runs in the order in which they would start.")


class TeamShare(models.Model):
    """A team's weight in fair sharing of borrowed devices. No row: 1."""

    team = models.OneToOneField("accounts.Team", on_delete=models.CASCADE, related_name="share")
    weight = models.FloatField(default=1.0)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(weight__gt=0), name="weight_above_0")]


class TeamQuota(models.Model):
    """A team's devices in a pool: `nominal` are its own, up to `borrow_cap` more may be borrowed (None: all idle ones)."""

    team = models.ForeignKey("accounts.Team", on_delete=models.CASCADE, related_name="quotas")
    pool = models.ForeignKey("cluster.Pool", on_delete=models.CASCADE, related_name="quotas")
    nominal = models.PositiveIntegerField(default=0)
    borrow_cap = models.PositiveIntegerField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["team", "pool"], name="one_quota_a_pool")]


class Usage(models.Model):
    """Device-seconds of a team's released allocations, exponentially decayed to the instant `at`."""

    team = models.OneToOneField("accounts.Team", on_delete=models.CASCADE, related_name="usage")
    device_seconds = models.FloatField(default=0.0)
    at = models.DateTimeField()


class WaitingReason(models.Model):
    """Why a queued run waits, as text and code. Written when it changes."""

    run = models.OneToOneField("runs.Run", on_delete=models.CASCADE, related_name="waiting")
    code = models.CharField(max_length=40)
    text = models.TextField()
    detail = models.JSONField(default=dict)
    sooner = models.TextField(blank=True, help_text="What would let it start sooner.")
    estimated_start = models.DateTimeField(null=True)
    changed_at = models.DateTimeField()


class Reservation(models.Model):
    """Devices that the last plan reserved for a blocked run: `{node id: [device ids]}`, expected to be free at `start`."""

    run = models.OneToOneField("runs.Run", on_delete=models.CASCADE, related_name="reservation")
    pool = models.ForeignKey("cluster.Pool", on_delete=models.CASCADE, related_name="+")
    devices = models.JSONField()
    start = models.DateTimeField(null=True)
    cleared = models.BooleanField(default=False, help_text="Others were asked to stop for it: it is the next to start.")


class BackfillTerm(models.Model):
    """Condition of a backfilled attempt: it leaves the devices of the run it passed at `until`."""

    attempt = models.OneToOneField("runs.Attempt", on_delete=models.CASCADE, related_name="backfill_term")
    for_run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="+")
    until = models.DateTimeField()

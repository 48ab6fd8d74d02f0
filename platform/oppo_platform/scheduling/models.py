"""Who holds which device, and the messages that tell a node so."""

from __future__ import annotations

from django.db import models
from django.db.models import Q


class Allocation(models.Model):
    """A device given to an attempt. The partial unique index makes a second live one impossible."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="allocations")
    device = models.ForeignKey("cluster.Device", on_delete=models.PROTECT, related_name="allocations")
    created_at = models.DateTimeField()
    released_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["device"], condition=Q(released_at__isnull=True), name="one_live_allocation_a_device")
        ]


class Dispatch(models.Model):
    """The outbox of launch orders: written with the allocation, sent after the commit, sent again while unclaimed."""

    attempt = models.OneToOneField("runs.Attempt", on_delete=models.CASCADE, related_name="dispatch")
    queue = models.CharField(max_length=160)
    created_at = models.DateTimeField()
    sent_at = models.DateTimeField(null=True)
    sends = models.PositiveIntegerField(default=0)


class SchedulerBeat(models.Model):
    """One row: when the last cycle ran, so that the scheduler can credit its own downtime to every lease."""

    last_cycle_at = models.DateTimeField()

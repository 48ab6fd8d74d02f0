"""Tables of disk usage, quotas and retention rules, deleted runs, and pending deletions of artifact folders."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

PARTS = ("series", "timeline", "samples", "logs", "checkpoints")


class RunStorage(models.Model):
    """Disk usage of a run in bytes, from the housekeeper's last measurement (`storage.usage`)."""

    run = models.OneToOneField("runs.Run", primary_key=True, on_delete=models.CASCADE, related_name="storage")
    series = models.PositiveBigIntegerField(default=0)
    timeline = models.PositiveBigIntegerField(default=0)
    samples = models.PositiveBigIntegerField(default=0)
    logs = models.PositiveBigIntegerField(default=0)
    checkpoints = models.PositiveBigIntegerField(default=0)
    bytes = models.GeneratedField(
        expression=F("series") + F("timeline") + F("samples") + F("logs") + F("checkpoints"),
        output_field=models.BigIntegerField(),
        db_persist=True,
    )
    measured_at = models.DateTimeField()
    settled = models.BooleanField(default=False, help_text="It has ended, and everything was counted.")
    marks = models.JSONField(default=dict, help_text="Up to which step or line attempts were counted: {part: {id: place}}.")
    detail_deleted_at = models.DateTimeField(null=True, help_text="When its timeline, samples and logs were deleted.")
    detail_pending = models.BooleanField(default=False, help_text="Some of them are still there.")

    class Meta:
        indexes = [models.Index(fields=["measured_at"], condition=Q(settled=False), name="storage_unsettled")]


class TeamStorage(models.Model):
    """A team's disk usage, quota and retention rules. Without a row: no limits."""

    team = models.OneToOneField("accounts.Team", primary_key=True, on_delete=models.CASCADE, related_name="storage")
    used_bytes = models.PositiveBigIntegerField(default=0)
    used_at = models.DateTimeField(null=True)
    quota_bytes = models.PositiveBigIntegerField(null=True, help_text="None: no limit.")
    detail_days = models.PositiveIntegerField(null=True, help_text="Timelines, samples and logs of ended runs. None: for ever.")
    run_days = models.PositiveIntegerField(null=True, help_text="Ended runs. None: for ever.")
    keep_checkpoints = models.PositiveIntegerField(null=True, help_text="Newest ones of an ended run. None: all.")
    retention_set_at = models.DateTimeField(null=True, help_text="When the three were last changed.")
    retained_at = models.DateTimeField(null=True, help_text="When they were last applied.")


class DatabaseDisk(models.Model):
    """One row: the database's free space at the housekeeper's last check."""

    free_bytes = models.PositiveBigIntegerField(null=True, help_text="None: nobody can tell.")
    low = models.BooleanField(default=False)
    looked_at = models.DateTimeField()


class Deletion(models.Model):
    """A deleted run: in the trash until `due_at`, then purged in batches, then a tombstone.

    `Run.deleted_at` is set at once and hides the run; `Run.purged_at` when it can no longer be restored.
    """

    run = models.OneToOneField("runs.Run", primary_key=True, on_delete=models.CASCADE, related_name="deletion")
    at = models.DateTimeField()
    actor = models.CharField(max_length=160, help_text="user:ada, retention")
    due_at = models.DateTimeField(help_text="Until then it can be restored.")
    ended_at = models.DateTimeField(null=True, help_text="When its last row of telemetry was gone.")
    rows = models.PositiveBigIntegerField(default=0, help_text="Rows of telemetry that were deleted.")

    class Meta:
        indexes = [models.Index(fields=["due_at"], condition=Q(ended_at__isnull=True), name="deletion_due")]


class FolderDeletion(models.Model):
    """A pending deletion of an artifact folder, by the platform or a node's agent. The row is deleted with the folder.

    It has the run's number instead of a foreign key, because it may outlive the run while a node is away.
    """

    team = models.ForeignKey("accounts.Team", on_delete=models.CASCADE, related_name="+")
    run_number = models.PositiveBigIntegerField()
    node = models.ForeignKey(
        "cluster.Node",
        null=True,
        on_delete=models.CASCADE,
        related_name="folder_deletions",
        help_text="None: the platform's machine.",
    )
    url = models.CharField(max_length=2000)
    bytes = models.PositiveBigIntegerField(default=0, help_text="What it is thought to take.")
    asked_at = models.DateTimeField()
    not_before = models.DateTimeField(null=True, help_text="Tried in vain; again then.")
    error = models.TextField(blank=True, help_text="Why it could not be deleted the last time.")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["url", "node"], name="one_deletion_a_folder", nulls_distinct=False),
        ]

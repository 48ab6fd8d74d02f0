"""What runs take, what teams may take and keep, runs on their way out, and folders that are to be deleted where they lie."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

PARTS = ("series", "timeline", "samples", "logs", "checkpoints")


class RunStorage(models.Model):
    """What a run takes, in bytes, as the housekeeper last measured it (`storage.usage`)."""

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
    """What a team's runs take together, what they may, and how long what they told is kept. Without a row: all, for ever."""

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
    """One row: how much room the database has, as the housekeeper saw it last."""

    free_bytes = models.PositiveBigIntegerField(null=True, help_text="None: nobody can tell.")
    low = models.BooleanField(default=False)
    looked_at = models.DateTimeField()


class Deletion(models.Model):
    """A run that was deleted: in the trash until `due_at`, then taken away bit by bit, then a line that says it was there.

    `Run.deleted_at` is set from the beginning and hides it; `Run.purged_at` when nothing of it can be brought back any more.
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
    """A folder of artifacts that is to be deleted by the platform, or by the agent of a node. The row goes when the folder has.

    It names its run by number only, because it may outlive it: a node may be away for long.
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

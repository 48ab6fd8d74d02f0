"""What attempts told, packed the way it came: one row a (series, batch), one a step, one a line.

Rows belong to an attempt; `selectors` merge a run's attempts (the newer wins from its first step on).
"""

from __future__ import annotations

from django.db import models


class ProducerMark(models.Model):
    """The number of the last event applied of one producer. Its lock makes ingest apply each event exactly once."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="producers")
    producer = models.CharField(max_length=16)
    high_water = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["attempt", "producer"], name="one_mark_a_producer")]


class SeriesChunk(models.Model):
    """Some consecutive points of one metric: int32 steps and float64 values, little-endian, as long as each other."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="+")
    key = models.CharField(max_length=200)
    first_step = models.PositiveIntegerField()
    last_step = models.PositiveIntegerField()
    steps = models.BinaryField()
    values = models.BinaryField()

    class Meta:
        indexes = [models.Index(fields=["attempt", "key", "first_step"], name="chunk_by_series")]


class StepAxis(models.Model):
    """The other x axes, once a step: training time, trained response tokens, device-seconds, all since step 0."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="+")
    step = models.PositiveIntegerField()
    elapsed_s = models.FloatField()
    generated_tokens = models.PositiveBigIntegerField()
    device_seconds = models.FloatField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["attempt", "step"], name="one_axis_a_step")]


class SpanBatch(models.Model):
    """The timeline of one step: a `SpansEvent` without its envelope."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="+")
    step = models.PositiveIntegerField()
    data = models.JSONField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["attempt", "step"], name="one_timeline_a_step")]


class Decision(models.Model):
    """What a controller decided, and why."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="+")
    step = models.PositiveIntegerField()
    controller = models.CharField(max_length=16)
    old = models.FloatField()
    new = models.FloatField()
    reason = models.TextField()

    class Meta:
        indexes = [models.Index(fields=["attempt", "step"], name="decision_by_step")]


class SampleRow(models.Model):
    """One trained answer (`oppo_contract.events.Sample`). Its text is untrusted."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="+")
    step = models.PositiveIntegerField()
    data = models.JSONField()

    class Meta:
        indexes = [models.Index(fields=["attempt", "step"], name="sample_by_step")]


class LogLine(models.Model):
    """A line that the engine or its supervisor wrote. Its text is untrusted."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="+")
    stream = models.CharField(max_length=12)
    text = models.TextField()
    time = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["attempt", "id"], name="log_by_attempt")]

"""Tables of reported data. Points of a series are hot rows, one per (series, batch), until compaction makes blocks of them.

Rows belong to an attempt; `selectors` merge a run's attempts (the newer wins from its first step on).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db import models
from django.db.models import Func, Value
from django.db.models.fields.json import KeyTextTransform, KeyTransform
from django.db.models.functions import MD5, Cast, Coalesce, Concat, Lower


def derived(expression: Any, field: models.Field[Any, Any]) -> models.GeneratedField:
    """A column that the database computes when the row is written."""
    return models.GeneratedField(expression=expression, output_field=field, db_persist=True)


def json_text(key: str, place: int | None = None) -> KeyTextTransform:
    """The value in `data` under the key, as text; of a list, the element at that index."""
    return KeyTextTransform(key, "data") if place is None else KeyTextTransform(place, KeyTransform(key, "data"))


def derived_number(key: str, place: int | None = None) -> models.GeneratedField:
    """The value as a number; null if it was not finite."""
    return derived(Cast(json_text(key, place), models.FloatField()), models.FloatField(null=True))


def searched_texts() -> Iterator[Any]:
    """Prompt, response, and the contents of a chat prompt's turns as the text of a JSON list; a line each."""
    contents = Func("data", Value("$.messages[*].content"), function="jsonb_path_query_array", output_field=models.JSONField())
    yield from (json_text("prompt"), Value("\n"), json_text("response"), Value("\n"), Cast(contents, models.TextField()))


class ProducerMark(models.Model):
    """Number of the last event applied of one producer. Its row lock makes ingest apply each event exactly once."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="producers")
    producer = models.CharField(max_length=16)
    high_water = models.PositiveBigIntegerField(default=0)
    # The mark when the attempt's series were last compacted; only the engine's counts.
    sealed = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["attempt", "producer"], name="one_mark_a_producer")]


class Series(models.Model):
    """One metric of one attempt. Keys that begin with `@` are its x axes (`metric_writer.AXIS_KEYS`)."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="+")
    key = models.CharField(max_length=200)
    # Of the compacted points, without hot ones.
    points = models.PositiveBigIntegerField(default=0)
    first_step = models.PositiveIntegerField(default=0)
    last_step = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["attempt", "key"], name="one_series_a_key")]


class HotPoints(models.Model):
    """Points of a series from one batch (`blocks.pack_points`), until compaction."""

    series = models.ForeignKey(Series, on_delete=models.CASCADE, related_name="hot")
    first_step = models.PositiveIntegerField()
    last_step = models.PositiveIntegerField()
    data = models.BinaryField()


class Block(models.Model):
    """At most 4,096 compacted points of a series, sorted by step, with their pyramid (`telemetry.blocks`).

    Blocks of a series do not overlap. Large columns are stored outside the row: reading `coarse` of many blocks reads no points.
    """

    series = models.ForeignKey(Series, on_delete=models.CASCADE, related_name="blocks", db_index=False)
    first_step = models.PositiveIntegerField()
    last_step = models.PositiveIntegerField()
    count = models.PositiveIntegerField()
    stride = models.PositiveIntegerField(help_text="Between two steps; 0 where they are not equally far apart.")
    points = models.BinaryField()
    fine = models.BinaryField(help_text="Buckets of 16 points.")
    coarse = models.BinaryField(help_text="Buckets of 256 points.")
    whole = models.BinaryField(help_text="One bucket.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["series", "first_step"], name="one_block_a_first_step")]


class HousekeeperBeat(models.Model):
    """One row: when the last round of housekeeping ended."""

    last_round_at = models.DateTimeField()


class SpanBatch(models.Model):
    """The timeline of one step: a `SpansEvent` without its envelope."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="+")
    step = models.PositiveIntegerField()
    data = models.JSONField()
    far = models.BinaryField(help_text="The same from afar (`telemetry.far`).")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["attempt", "step"], name="one_timeline_a_step")]


class Decision(models.Model):
    """A controller's decision and its reason."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="+")
    step = models.PositiveIntegerField()
    controller = models.CharField(max_length=16)
    old = models.FloatField()
    new = models.FloatField()
    reason = models.TextField()
    at = models.DateTimeField(null=True, help_text="Unknown for those that were stored before it was kept.")

    class Meta:
        indexes = [models.Index(fields=["attempt", "step"], name="decision_by_step")]


class SampleRow(models.Model):
    """One trained answer (`oppo_contract.events.Sample`). Its text is untrusted.

    The database derives the columns for filters, order and search (`telemetry.samples`) from `data`.
    """

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="+")
    step = models.PositiveIntegerField()
    data = models.JSONField()
    score = derived_number("score")
    kl = derived_number("kl")
    # Not integers, because a count from a broken worker may exceed any integer column.
    length = derived_number("length")
    age = derived_number("age")
    version = derived_number("versions", 0)
    ending = derived(json_text("ending"), models.TextField(null=True))
    # Of a held-out prompt its index, which orders prompts as their file does.
    sequence_id = derived_number("sequence_id")
    held_out = derived(
        Cast(Coalesce(json_text("held_out"), Value("false"), output_field=models.TextField()), models.BooleanField()),
        models.BooleanField(),
    )
    # Two conversations may end with the same user turn (`prompt`).
    prompt_key = derived(MD5(Coalesce(json_text("messages"), json_text("prompt"))), models.TextField())
    searched = derived(Lower(Concat(*searched_texts(), output_field=models.TextField())), models.TextField())

    class Meta:
        indexes = [
            models.Index(fields=["attempt", "step"], name="sample_by_step"),
            models.Index(fields=["attempt", "prompt_key", "step"], name="sample_by_prompt"),
            # Has everything by which prompts are compared (`sample_comparison`), so that no texts are read for their order.
            models.Index(
                fields=["attempt", "held_out", "step"],
                include=["id", "prompt_key", "score", "length", "ending", "sequence_id"],
                name="sample_by_split",
            ),
        ]


class LogLine(models.Model):
    """A line of the engine's or its supervisor's log. Its text is untrusted."""

    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="+")
    stream = models.CharField(max_length=12)
    text = models.TextField()
    time = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["attempt", "id"], name="log_by_attempt")]

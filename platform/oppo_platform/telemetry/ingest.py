"""Applies batches of events exactly once.

Guarantee: a producer's events are applied in the order of their numbers without duplicates or gaps, under repetition, reordering
and concurrent senders. The (attempt, producer) row is locked; events up to its high-water mark are skipped; a gap is refused; the
batch is applied and the mark advanced in one transaction. A fenced attempt may still send its history.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from django.conf import settings
from django.db import transaction

from oppo_contract.events import (
    DecisionEvent,
    DroppedEvent,
    Envelope,
    Event,
    LogEvent,
    SamplesEvent,
    SpansEvent,
    StartedEvent,
    StepEvent,
)
from oppo_platform.notify import run_changed
from oppo_platform.runs.models import Attempt, Change, Run
from oppo_platform.runs.transitions import AttemptRefused
from oppo_platform.telemetry.metric_writer import write_steps
from oppo_platform.telemetry.models import Decision, LogLine, ProducerMark, SampleRow, SpanBatch
from oppo_platform.telemetry.timeline_downsampling import pack_downsampled

LONGEST_LOG_LINE = 4000
PLATFORM_STREAM = "platform"
DEVICE_PREFIXES = ("busy/", "bubble/", "idle_s/")
DRIVER_PREFIXES = ("nvml/", "gpm/")


class SequenceGapError(Exception):
    """Events are missing before or inside the batch; send from `expected_seq` on."""

    def __init__(self, expected_seq: int) -> None:
        self.expected_seq = expected_seq
        super().__init__(f"Expected event {expected_seq}.")


def ingest(attempt_id: int, producer: str, events: Sequence[Event], rank: int = 0) -> int:
    """Apply the new events of a batch and return the producer's high-water mark.

    Args:
        events: of one producer, oldest first, numbered without gaps.
        rank: of the node among those of the attempt. Producers of further nodes count separately, as `engine/1`, and only
            their log lines are stored: the first node reports the training.

    Raises:
        SequenceGapError: nothing was applied; send from `expected_seq` on.
        AttemptRefused: nothing was applied, because the run has been deleted permanently.
    """
    with transaction.atomic():
        mark = _locked_mark(attempt_id, f"{producer}/{rank}" if rank else producer)
        fresh = [event for event in events if event.seq > mark.high_water]
        for number, event in enumerate(fresh, start=mark.high_water + 1):
            if event.seq != number:
                _refuse_deleted(Run.objects.only("id", "purged_at").get(attempts=attempt_id))  # a deleted run has no marks
                raise SequenceGapError(number)
        if fresh:
            _apply(
                Attempt.objects.get(pk=attempt_id),
                [_as_node_log(e, rank) for e in fresh if isinstance(e, LogEvent | DroppedEvent)] if rank else fresh,
            )
            mark.high_water = fresh[-1].seq
            mark.save(update_fields=["high_water"])
    return mark.high_water


def _as_node_log(event: LogEvent | DroppedEvent, rank: int) -> Event:
    if isinstance(event, DroppedEvent):
        envelope = {"producer": event.producer, "seq": event.seq, "time": event.time}
        event = LogEvent(stream="supervisor", lines=[event.summary()], **envelope)
    return event.model_copy(update={"lines": [f"[node {rank}] {line}" for line in event.lines]})


def _locked_mark(attempt_id: int, producer: str) -> ProducerMark:
    # Two concurrent first batches: one inserts, the other waits and finds the row.
    ProducerMark.objects.bulk_create([ProducerMark(attempt_id=attempt_id, producer=producer)], ignore_conflicts=True)
    return ProducerMark.objects.select_for_update().get(attempt_id=attempt_id, producer=producer)


def _apply(attempt: Attempt, events: list[Event]) -> None:
    # The run is locked first, as in every writer. This also orders the log lines of its producers.
    run = Run.objects.select_for_update().only("id", "cursor", "epochs", "latest", "purged_at").get(pk=attempt.run_id)
    _refuse_deleted(run)
    by_kind: dict[type[Envelope], list[Any]] = defaultdict(list)
    for event in events:
        by_kind[type(event)].append(event)
    for kind, writer in WRITERS.items():
        if by_kind[kind]:
            writer(attempt, by_kind[kind])
    steps = by_kind[StepEvent]
    _advance_run(run, attempt, steps, _write_steps(attempt, steps) if steps else frozenset())


def _refuse_deleted(run: Run) -> None:
    if run.purged_at is not None:
        raise AttemptRefused("ended", f"Run {run.pk} has been deleted; its events are no longer stored.")


def _advance_run(run: Run, attempt: Attempt, steps: list[StepEvent], dropped: frozenset[str]) -> None:
    """Update the fields that lists and page headers show, under the run's lock; a fenced attempt changes only the cursor.

    `dropped`: metrics beyond the run's limit, which are not stored here either.
    """
    run.cursor += 1
    changed = ["cursor"]
    if steps and attempt.epoch == run.epochs:
        newest = steps[-1]
        for event in steps:
            run.latest.update({key: finite(value) for key, value in event.metrics.items() if key not in dropped})
        if len(run.latest) > settings.OPPO_MOST_SERIES:  # with those of earlier attempts
            run.latest = {key: value for key, value in run.latest.items() if key in newest.metrics}
        run.latest.update(dict.fromkeys(_stale_device_metrics(run.latest, newest.metrics)))
        run.bubble = _bubble(run.latest)
        run.step, run.elapsed_s = newest.step, finite(newest.elapsed_s) or 0.0
        run.generated_tokens, run.device_seconds = newest.generated_tokens, finite(newest.device_seconds) or 0.0
        changed += ["latest", "bubble", "step", "elapsed_s", "generated_tokens", "device_seconds"]
    run.save(update_fields=changed)
    run_changed(run.pk)


def _stale_device_metrics(latest: Mapping[str, object], metrics: Mapping[str, float]) -> list[str]:
    """Metrics of devices that this step does not report, because an older attempt used them. The caller sets them to null."""
    if not any(key.startswith(DEVICE_PREFIXES) for key in metrics):
        return []
    gone = [key for key in latest if key.startswith(DEVICE_PREFIXES) and key not in metrics]
    # The driver is sampled four times per second: a shorter step may have no sample although its device is in use.
    present = {key.removeprefix("busy/") for key in metrics if key.startswith("busy/")}
    present |= {_device(key) for key in metrics if key.startswith(DRIVER_PREFIXES)}
    return gone + [key for key in latest if key.startswith(DRIVER_PREFIXES) and _device(key) not in present]


def _device(key: str) -> str:
    """The device in `nvml/{device}/{figure}`; its name may contain slashes."""
    return key.partition("/")[2].rpartition("/")[0]


def _bubble(latest: dict[str, float | None]) -> float | None:
    shares = [value for key, value in latest.items() if key.startswith("bubble/") and value is not None]
    return fmean(shares) if shares else None


def finite(value: float) -> float | None:
    """The value for JSON: None if it is NaN or infinite."""
    return value if math.isfinite(value) else None


def _write_start(attempt: Attempt, events: list[StartedEvent]) -> None:
    # Only the attempt's first start: it is the zero of its spans' times.
    start = events[0]
    Attempt.objects.filter(pk=attempt.pk, engine_started_at__isnull=True).update(
        engine_started_at=start.time,
        device_names=_storable(start.devices),
        lanes=_storable(start.lanes),
        provenance=_storable(start.provenance.model_dump()) if start.provenance else None,
    )


def _write_steps(attempt: Attempt, events: list[StepEvent]) -> frozenset[str]:
    """Store metrics and axes; returns the metrics that were not stored because the run has too many."""
    if attempt.first_step is None or events[0].step < attempt.first_step:
        Attempt.objects.filter(pk=attempt.pk).update(first_step=events[0].step)
    dropped = write_steps(attempt, events)
    if dropped and not LogLine.objects.filter(attempt=attempt, stream=PLATFORM_STREAM).exists():
        limit = f"This run has {settings.OPPO_MOST_SERIES} metrics, the limit for a run (OPPO_MOST_SERIES)."
        text = f"{limit} Further metrics are not stored, such as {dropped[0]}."
        LogLine.objects.create(attempt=attempt, stream=PLATFORM_STREAM, text=text, time=_time(events[-1]))
    return frozenset(dropped)


def _write_spans(attempt: Attempt, events: list[SpansEvent]) -> None:
    rows = []
    for event in {event.step: event for event in events}.values():
        spans = _storable(event.model_dump(exclude={"producer", "seq", "time", "kind"}))
        rows.append(SpanBatch(attempt=attempt, step=event.step, data=spans, far=pack_downsampled(spans)))
    SpanBatch.objects.bulk_create(rows, update_conflicts=True, unique_fields=["attempt", "step"], update_fields=["data", "far"])


def _write_decisions(attempt: Attempt, events: list[DecisionEvent]) -> None:
    Decision.objects.bulk_create(
        Decision(
            attempt=attempt,
            step=event.step,
            controller=event.controller,
            old=event.old,
            new=event.new,
            reason=_storable(event.reason),
            at=_time(event),
        )
        for event in events
    )


def _write_samples(attempt: Attempt, events: list[SamplesEvent]) -> None:
    SampleRow.objects.bulk_create(
        SampleRow(attempt=attempt, step=event.step, data=_storable(sample.model_dump()))
        for event in events
        for sample in event.samples
    )


def _write_logs(attempt: Attempt, events: list[LogEvent]) -> None:
    LogLine.objects.bulk_create(
        LogLine(attempt=attempt, stream=event.stream, text=_storable(line)[:LONGEST_LOG_LINE], time=_time(event))
        for event in events
        for line in event.lines
    )


def _write_dropped(attempt: Attempt, events: list[DroppedEvent]) -> None:
    """Report it among the run's events and in its log."""
    actor = f"node:{attempt.node.name}"
    for event in events:
        at, summary = _time(event), event.summary()
        LogLine.objects.create(attempt=attempt, stream="supervisor", text=summary, time=at)
        Change.objects.create(run_id=attempt.run_id, what="left out", reason=summary, actor=actor, at=at)


def _time(event: Event) -> datetime:
    return datetime.fromtimestamp(event.time, UTC)


def _storable(value: Any) -> Any:
    """Plain data without values that PostgreSQL's text and JSON cannot store: NUL characters, NaN, infinities."""
    match value:
        case str():
            return value.replace("\0", "\ufffd")
        case float():
            return finite(value)
        case dict():
            return {key: _storable(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_storable(inner) for inner in value]
    return value


# `CheckpointEvent` and `FinishedEvent` are not stored: supervisors register checkpoints and outcomes by API calls of their own.
WRITERS: dict[type[Envelope], Callable[[Attempt, list[Any]], None]] = {
    StartedEvent: _write_start,
    SpansEvent: _write_spans,
    DecisionEvent: _write_decisions,
    SamplesEvent: _write_samples,
    LogEvent: _write_logs,
    DroppedEvent: _write_dropped,
}

"""The TensorBoard tracker: an event file per attempt in the run's folder."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from oppo_core.trackers.config import TrackerConfig, commit, flatten
from oppo_core.trackers.cursor import Cursor
from oppo_core.trackers.protocol import Log, Samples, Step

QUEUED_EVENTS = 1000
FLUSH_S = 5
SAMPLE_FIELDS = ("score", "kl", "length", "age", "ending")


class TensorBoard:
    """Writes scalars (float32), the spec as hyperparameters and text, and samples as text.

    A session start at step n makes TensorBoard drop steps from n on in earlier files.
    """

    rewrites = True

    def __init__(self, config: TrackerConfig, cursor: Cursor, _log: Log) -> None:
        folder = Path(config.out) / config.settings["folder"]
        _wait_for_new_second(folder)
        self._writer = EventFileWriter(str(folder), QUEUED_EVENTS, FLUSH_S)
        self._last = cursor.step
        self._drop_from(cursor.step + 1)
        if cursor.step == 0:
            self._write_spec(config)
        self._writer.flush()

    def _write_spec(self, config: TrackerConfig) -> None:
        """Write the spec and tags as hyperparameters and as text."""
        tags = {"name": config.name, "commit": commit() or "unknown"}
        self._add(0, time.time(), *hparams_pb(flatten(config.spec) | {f"tag.{key}": value for key, value in tags.items()}).value)
        text = json.dumps({"tags": tags, "spec": config.spec}, indent=1, ensure_ascii=False)
        self._add(0, time.time(), _text("spec", text))

    def log_steps(self, steps: list[Step]) -> None:
        for step in steps:
            if step.number <= self._last:
                self._drop_from(step.number)
            values = [Summary.Value(tag=key, simple_value=value) for key, value in step.metrics.items()]
            self._add(step.number, step.time, *values)
            self._last = step.number
        self._writer.flush()

    def log_samples(self, samples: Samples) -> None:
        self._add(samples.step, samples.time, _text(samples.kind, "\n\n".join(map(_format_sample, samples.rows))))
        self._writer.flush()

    def close(self, outcome: str) -> None:
        self._writer.close()

    def _drop_from(self, step: int) -> None:
        session = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=step, wall_time=time.time(), session_log=session))

    def _add(self, step: int, at: float, *values: Summary.Value) -> None:
        self._writer.add_event(Event(step=step, wall_time=at, summary=Summary(value=values)))


def _wait_for_new_second(folder: Path) -> None:
    """TensorBoard reads files in the order of their names, which begin with the second of their creation."""
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)


def _text(tag: str, text: str) -> Summary.Value:
    """Plain text: indented, so that it is not rendered as Markdown."""
    quoted = "\n".join("    " + line for line in text.splitlines())
    shape = {"dim": [{"size": 1}]}
    tensor = TensorProto(dtype="DT_STRING", string_val=[quoted.encode("utf-8", "replace")], tensor_shape=shape)
    return Summary.Value(tag=f"{tag}/text_summary", metadata=create_summary_metadata("", ""), tensor=tensor)


def _format_sample(row: dict[str, object]) -> str:
    fields = "  ".join(f"{key} {row[key]}" for key in SAMPLE_FIELDS if row.get(key) is not None)
    return f"#{row['sequence_id']}  {fields}\n> {row['prompt']}\n{row['response']}"


TRACKER = TensorBoard

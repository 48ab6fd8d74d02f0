"""TensorBoard: event files below the run's folder, a new one each attempt."""

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

from oppo_core.trackers.config import TrackerConfig, commit, flat
from oppo_core.trackers.cursor import Cursor
from oppo_core.trackers.protocol import Samples, Say, Step

QUEUED_EVENTS = 1000
FLUSHED_EVERY_S = 5
SHOWN_OF_AN_ANSWER = ("score", "kl", "length", "age", "ending")


class TensorBoard:
    """Writes scalars (32-bit, as its charts are), the spec as hyperparameters and text, and answers as text.

    A session that starts at step n makes TensorBoard forget what earlier files say of n and all later steps.
    """

    rewrites = True

    def __init__(self, config: TrackerConfig, cursor: Cursor, _say: Say) -> None:
        folder = Path(config.out) / config.settings["folder"]
        _wait_for_another_second(folder)
        self._writer = EventFileWriter(str(folder), QUEUED_EVENTS, FLUSHED_EVERY_S)
        self._last = cursor.step
        self._forget_from(cursor.step + 1)
        if cursor.step == 0:
            self._introduce(config)
        self._writer.flush()

    def _introduce(self, config: TrackerConfig) -> None:
        """The spec and the tags, as hyperparameters and to read."""
        tags = {"name": config.name, "commit": commit() or "unknown"}
        self._add(0, time.time(), *hparams_pb(flat(config.spec) | {f"tag.{key}": value for key, value in tags.items()}).value)
        whole = json.dumps({"tags": tags, "spec": config.spec}, indent=1, ensure_ascii=False)
        self._add(0, time.time(), _text("spec", whole))

    def log_steps(self, steps: list[Step]) -> None:
        """An event a step. One that comes again replaces the former."""
        for step in steps:
            if step.number <= self._last:
                self._forget_from(step.number)
            values = [Summary.Value(tag=key, simple_value=value) for key, value in step.metrics.items()]
            self._add(step.number, step.time, *values)
            self._last = step.number
        self._writer.flush()

    def log_samples(self, samples: Samples) -> None:
        """All answers of a step as one text."""
        self._add(samples.step, samples.time, _text(samples.kind, "\n\n".join(map(_shown, samples.rows))))
        self._writer.flush()

    def close(self, outcome: str) -> None:
        """Files know no outcome."""
        self._writer.close()

    def _forget_from(self, step: int) -> None:
        session = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=step, wall_time=time.time(), session_log=session))

    def _add(self, step: int, at: float, *values: Summary.Value) -> None:
        self._writer.add_event(Event(step=step, wall_time=at, summary=Summary(value=values)))


def _wait_for_another_second(folder: Path) -> None:
    """Files are read in the order of their names, which begin with the second of their birth and go on with a process id."""
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)


def _text(tag: str, text: str) -> Summary.Value:
    """Text as it is: indented, so that its Markdown is none."""
    quoted = "\n".join("    " + line for line in text.splitlines())
    shape = {"dim": [{"size": 1}]}
    tensor = TensorProto(dtype="DT_STRING", string_val=[quoted.encode("utf-8", "replace")], tensor_shape=shape)
    return Summary.Value(tag=f"{tag}/text_summary", metadata=create_summary_metadata("", ""), tensor=tensor)


def _shown(row: dict[str, object]) -> str:
    figures = "  ".join(f"{key} {row[key]}" for key in SHOWN_OF_AN_ANSWER if row.get(key) is not None)
    return f"#{row['sequence_id']}  {figures}\n> {row['prompt']}\n{row['response']}"


TRACKER = TensorBoard

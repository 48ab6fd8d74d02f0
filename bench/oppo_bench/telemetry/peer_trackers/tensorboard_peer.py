"""TensorBoard's part, in its own environment: LOGDIR FILE.npz, which has an array `RUN KEY` per series, to event files."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def main(logdir: str, file: str) -> None:
    """One event file per run."""
    writers: dict[str, EventFileWriter] = {}
    for name, values in np.load(file).items():
        run, _, key = name.partition(" ")
        if run not in writers:
            writers[run] = EventFileWriter(str(Path(logdir) / run), max_queue_size=10_000, flush_secs=600)
        tag = key.replace("|", "/")
        for step, value in enumerate(values.tolist(), start=1):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writers[run].add_event(Event(step=step, wall_time=1e9 + step, summary=summary))
    for writer in writers.values():
        writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

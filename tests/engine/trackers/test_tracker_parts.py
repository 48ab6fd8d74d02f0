"""What tracking is made of, each part by itself: tail of the event log, cursor, delivery, names, flat specs."""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_core.trackers.config import TrackerConfig, flatten
from oppo_core.trackers.cursor import Cursor, read_cursor
from oppo_core.trackers.delivery import Delivery
from oppo_core.trackers.event_tail import EventTail
from oppo_core.trackers.mlflow import NARROW, WIDE, valid_name
from oppo_core.trackers.protocol import RefusedError, Samples, Step
from worker.outbox import punch


def line(seq: int, filler: int = 0) -> bytes:
    return json.dumps({"kind": "step", "seq": seq, "filler": "x" * filler}).encode() + b"\n"


def test_a_tail_reads_whole_lines_as_they_come(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(line(1) + line(2) + line(3)[:9])
    tail = EventTail(log, len(line(1)))
    assert [event["seq"] for event in tail.read(10)] == [2]
    assert tail.read(10) == []
    log.write_bytes(line(1) + line(2) + line(3) + line(4))
    assert [event["seq"] for event in tail.read(1)] == [3]
    assert [event["seq"] for event in tail.read(1)] == [4]
    assert (tail.offset, tail.skipped) == (log.stat().st_size, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="no holes in files elsewhere")
def test_deleted_events_are_skipped_and_counted(tmp_path: Path) -> None:
    """In the middle of an event, and more than one line may be long: 5 MiB."""
    log = tmp_path / "events.jsonl"
    log.write_bytes(b"".join(line(seq, 10_000) for seq in range(1, 511)))
    tail = EventTail(log, 0)
    assert [event["seq"] for event in tail.read(2)] == [1, 2]
    assert punch(log, 500 * len(line(100, 10_000)) + 77)
    assert tail.read(1000)[0]["seq"] in (501, 502)
    assert tail.skipped in (498, 499)


@pytest.mark.parametrize("until", [5, None])
def test_zeros_are_skipped_where_there_is_no_hole(tmp_path: Path, until: int | None) -> None:
    """Within a block of the disk, and when everything was deleted."""
    log = tmp_path / "events.jsonl"
    whole = b"".join(map(line, range(1, 5)))
    log.write_bytes(whole)
    tail = EventTail(log, 0)
    tail.read(1)
    zeros = len(line(1)) + until if until else len(whole)
    log.write_bytes(b"\0" * zeros + whole[zeros:])
    assert [event["seq"] for event in tail.read(10)] == ([3, 4] if until else [])
    with log.open("ab") as more:
        more.write(line(5))
    assert [event["seq"] for event in tail.read(10)] == [5]
    assert tail.skipped == (1 if until else 3)


def test_a_cursor_that_cannot_be_read_is_a_new_one(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    cursor = Cursor("id", step=4, events="log", offset=7)
    cursor.save(file)
    assert read_cursor(file) == cursor
    for damaged in ("", "[1]", '{"other": 1}'):
        file.write_text(damaged)
        assert read_cursor(file).step == 0


def test_a_cursor_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"run": "id", "step": 4, "metrics": {"a": NaN}, "settled": 2}')
    assert read_cursor(tmp_path / "x.json") == Cursor("id", 4, 2)


class Moody:
    """A tracker whose calls do what its script says: an exception is raised, anything else is fine."""

    rewrites = False
    script: list[Exception | None] = []
    got: list[list[int]] = []

    def __init__(self, *_: object) -> None:
        pass

    def log_steps(self, steps: list[Step]) -> None:
        mood = self.script.pop(0)
        if mood is not None:
            raise mood
        self.got.append([step.number for step in steps])

    def log_samples(self, samples: Samples) -> None:
        raise ValueError("no texts here")

    def close(self, outcome: str) -> None:
        raise OSError("it is gone")


def started(start: int) -> dict[str, Any]:
    return {"kind": "started", "start_step": start}


def steps(*numbers: int) -> list[dict[str, Any]]:
    axes = {"elapsed_s": 1.0, "generated_tokens": 1, "device_seconds": 1.0}
    return [{"kind": "step", "step": number, "time": 0.0, "metrics": {"a": "NaN"}, **axes} for number in numbers]


def delivery(folder: Path, said: list[str], pauses: list[float], events: str = "log", offset: int = 0) -> Delivery:
    (folder / "trackers").mkdir(exist_ok=True)
    config = TrackerConfig("mlflow", {}, {"name": "x"}, str(folder), events, offset, samples_every=2)
    return Delivery(config, Moody, Moody.rewrites, said.append, pauses.append)


def test_a_failure_is_told_once_and_tried_again_after_growing_pauses(tmp_path: Path) -> None:
    said: list[str] = []
    pauses: list[float] = []
    sending = delivery(tmp_path, said, pauses)
    away = [OSError("away\nfor long"), OSError("still"), OSError("still")]
    Moody.got, Moody.script = [], [None, *away, None, RefusedError("bad"), None]
    sending.deliver([started(0), *steps(1)], 10)
    for number in range(2, 5):
        sending.deliver(steps(number), 10 * number)
    sending.close("succeeded")
    assert Moody.got == [[1], [2], [4]]
    assert pauses == [0.5, 1.0, 2.0]
    assert said == [
        "OSError: away for long. It is retried, and missed steps are sent then. Training continues.", "connected again.",
        "RefusedError: bad. It is not sent.", "connected again.",
        "OSError: it is gone. Its run may be shown as unfinished there.",
    ]  # fmt: skip
    assert (sending.cursor.step, sending.cursor.offset) == (4, 40)


def test_a_later_attempt_goes_on_where_the_log_was_left(tmp_path: Path) -> None:
    """In the same log, which has steps that were not sent, with the start of the next attempt behind them."""
    said: list[str] = []
    Moody.got, Moody.script = [], [None] * 9
    delivery(tmp_path, said, []).deliver([started(0), *steps(1, 2)], 20)
    later = delivery(tmp_path, said, [], offset=50)
    assert later.cursor.offset == 20
    later.deliver([*steps(3, 4), started(2), *steps(3, 4, 5)], 70)
    assert Moody.got == [[1, 2], [3, 4], [5]]
    assert said == ["steps 3 to 4 may be trained again; it keeps what was sent before."]
    assert delivery(tmp_path, said, [], "another log", 5).cursor.offset == 5
    assert delivery(tmp_path, said, [], offset=60).cursor.offset == 60, "the log was replaced by a shorter one"


def test_the_last_step_may_come_again_and_samples_that_fail_are_given_up(tmp_path: Path) -> None:
    said: list[str] = []
    Moody.got, Moody.script = [], [None] * 9
    sending = delivery(tmp_path, said, [])
    samples = [{"kind": "samples", "step": number, "time": 0.0, "samples": []} for number in (1, 2, 4)]
    sending.deliver([started(0), *steps(1, 2), *samples], 10)
    sending.deliver(steps(2, 3), 20)
    assert Moody.got == [[1, 2], [2, 3]]
    assert said == ["ValueError: no texts here. No more samples are sent, only metrics."]


ODD_NAMES = [
    "", "acc (%)", "acc (#)", "/", "//", "/a", "a/", "a//b", "a/./b", "a/../b", ".", "..", "..a", "a\n", "a\\b",
    "x" * 251, "x" * 252,
]  # fmt: skip


def test_names_are_as_mlflow_takes_them() -> None:
    for name in ("busy/cpu:0", "critic/score/mean", "a b", ".a", "a..", "größe", "x" * 250):
        assert valid_name(name) == name
    assert valid_name("acc (%)").startswith("acc ___-")
    assert valid_name("busy/cpu:0", NARROW).startswith("busy/cpu_0-")
    changed = [valid_name(name) for name in ODD_NAMES]
    assert len(set(changed)) == len(ODD_NAMES)
    assert [valid_name(name) for name in changed] == changed


@given(st.text(max_size=300) | st.lists(st.sampled_from([*"./ :%ä", "x"])).map("".join), st.sampled_from([WIDE, NARROW]))
def test_a_changed_name_is_one_that_stays(name: str, refused: re.Pattern[str]) -> None:
    key = valid_name(name, refused)
    assert valid_name(key, refused) == key
    assert posixpath.normpath(key) == key
    assert not refused.search(key)
    assert not key.startswith(("/", ".."))
    assert 0 < len(key) <= 250


def test_a_spec_is_laid_flat() -> None:
    assert flatten({"a": {"b": 1, "c": None}, "d": [1, 2], "e": [], "f": [{"g": True}, {"g": False}], "h": "x"}) == {
        "a.b": 1, "d": "[1, 2]", "f.0.g": True, "f.1.g": False, "h": "x",
    }  # fmt: skip

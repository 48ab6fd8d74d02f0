"""What tracking is made of, each part by itself: the backlog, the memory, the courier and its pauses, names, flat specs."""

from __future__ import annotations

import json
import posixpath
import re
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from oppo_core.trackers.backlog import Backlog
from oppo_core.trackers.courier import Courier
from oppo_core.trackers.memory import Memory, remembered
from oppo_core.trackers.names import NARROW, WIDE, allowed_name
from oppo_core.trackers.order import Order, flat
from oppo_core.trackers.records import Step
from oppo_core.trackers.sink import RefusedError

PATIENT = 240.0  # seconds; the machine may be busy


def test_a_full_backlog_keeps_the_newest_and_every_other_one() -> None:
    backlog = Backlog(most=4)
    backlog.put("started", "started")
    for number in range(1, 6):
        backlog.put("step", str(number))
        backlog.put("samples", f"answers of {number}")
    backlog.close()
    lines = []
    while (line := backlog.take()) is not None:
        lines.append(line)
    assert lines == ["started", "1", "3", "5", "answers of 5"]
    assert (backlog.told, backlog.dropped) == (5, 2)


def test_a_backlog_waits_for_what_is_put() -> None:
    backlog, taken = Backlog(), []
    thread = threading.Thread(target=lambda: taken.append(backlog.take()))
    thread.start()
    backlog.put("step", "1")
    thread.join(PATIENT)
    assert taken == ["1"]


def test_memory_tells_what_is_new_of_a_step() -> None:
    memory = Memory()
    nan = float("nan")
    assert memory.news(Step(3, 0.0, {"a": 1.0, "b": nan})) == Step(3, 0.0, {"a": 1.0, "b": nan})
    assert memory.news(Step(3, 1.0, {"a": 1.0, "b": nan})) is None
    assert memory.news(Step(3, 2.0, {"a": 1.0, "b": nan, "c": 2.0})) == Step(3, 2.0, {"c": 2.0}, {"a": 1.0, "b": nan})
    assert memory.news(Step(2, 3.0, {"d": 1.0})) is None
    memory.leave_alone()
    assert memory.news(Step(3, 4.0, {"a": 5.0})) is None
    memory.go_back_to(1)
    assert memory.news(Step(2, 5.0, {"d": 1.0})) is not None


def test_memory_that_cannot_be_read_is_a_new_one(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    memory = Memory(step=4, metrics={"a": float("nan")})
    memory.save(file)
    assert (remembered(file).run, remembered(file).step) == (memory.run, 4)
    for damaged in ("", "[1]", '{"other": 1}'):
        file.write_text(damaged)
        assert remembered(file).step == 0


class Moody:
    """A sink whose calls do what its script says: an exception is raised, anything else is fine."""

    rewrites = False
    script: list[Exception | None] = []
    told: list[list[int]] = []

    def __init__(self, *_: object) -> None:
        pass

    def tell(self, steps: list[Step]) -> None:
        mood = self.script.pop(0)
        if mood is not None:
            raise mood
        self.told.append([step.number for step in steps])

    def show(self, answers: object) -> None:
        raise ValueError("no texts here")

    def close(self, outcome: str) -> None:
        raise OSError("it is gone")


def test_a_failure_is_told_once_and_tried_again_after_growing_pauses(tmp_path: Path) -> None:
    (tmp_path / "trackers").mkdir()
    said: list[str] = []
    pauses: list[float] = []
    order = Order("mlflow", {}, {"name": "x"}, str(tmp_path))
    courier = Courier(order, Moody, False, said.append, pauses.append)
    Moody.told, Moody.script = (
        [],
        [None, OSError("away\nfor long"), OSError("still"), OSError("still"), None, RefusedError("bad"), None],
    )
    courier.begin(0)
    for number in range(1, 5):
        courier.deliver([Step(number, 0.0, {"a": 1.0})], [])
    courier.close("succeeded")
    assert Moody.told == [[1], [2], [4]]
    assert pauses == [0.5, 1.0, 2.0]
    assert said == [
        "OSError: away for long. What is told meanwhile waits, up to a bound. Training goes on.", "it answers again.",
        "RefusedError: bad. It is left out.", "it answers again.",
        "OSError: it is gone. Its run may be shown as unfinished there.",
    ]  # fmt: skip
    assert json.loads((tmp_path / "trackers" / "mlflow.json").read_text())["step"] == 4


ODD_NAMES = [
    "", "acc (%)", "acc (#)", "/", "//", "/a", "a/", "a//b", "a/./b", "a/../b", ".", "..", "..a", "a\n", "a\\b",
    "x" * 251, "x" * 252,
]  # fmt: skip


def test_names_are_as_mlflow_takes_them() -> None:
    for name in ("busy/cpu:0", "critic/score/mean", "a b", ".a", "a..", "größe", "x" * 250):
        assert allowed_name(name) == name
    assert allowed_name("acc (%)").startswith("acc ___-")
    assert allowed_name("busy/cpu:0", NARROW).startswith("busy/cpu_0-")
    changed = [allowed_name(name) for name in ODD_NAMES]
    assert len(set(changed)) == len(ODD_NAMES)
    assert [allowed_name(name) for name in changed] == changed


@given(st.text(max_size=300) | st.lists(st.sampled_from([*"./ :%ä", "x"])).map("".join), st.sampled_from([WIDE, NARROW]))
def test_a_changed_name_is_one_that_stays(name: str, refused: re.Pattern[str]) -> None:
    key = allowed_name(name, refused)
    assert allowed_name(key, refused) == key
    assert posixpath.normpath(key) == key
    assert not refused.search(key)
    assert not key.startswith(("/", ".."))
    assert 0 < len(key) <= 250


def test_a_spec_is_laid_flat() -> None:
    assert flat({"a": {"b": 1, "c": None}, "d": [1, 2], "e": [], "f": [{"g": True}, {"g": False}], "h": "x"}) == {
        "a.b": 1, "d": "[1, 2]", "f.0.g": True, "f.1.g": False, "h": "x",
    }  # fmt: skip

"""Runs that tell something of every kind, and the housekeeper's rounds, for tests of what becomes of it."""

from __future__ import annotations

from oppo_contract.safe_delete import file_url_path
from oppo_platform.housekeeping import rounds
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.telemetry.metric_reader import attempt_ranges, read_points


def series_points(run, key):
    """Step → value of one metric of a run in full resolution, ascending by step."""
    steps, values = read_points({run.pk: attempt_ranges(run)}, [key]).get((run.pk, key), ([], []))
    return {int(step): float(value) for step, value in zip(steps, values, strict=True)}


def sample(number):
    text = f"prompt {number} <b>" * 20
    return {"sequence_id": number, "prompt": text, "response": text, "stale_response": "", "score": 0.5, "kl": 0.1, "length": 3,
            "age": 0, "versions": [0, 0]}  # fmt: skip


def spans(seq, step):
    return {"kind": "spans", "producer": "engine", "seq": seq, "time": 1.0, "step": step, "window_s": [0.0, 1.0],
            "device": ["cpu:0"], "role": ["actor"], "phase": ["decode"], "start_s": [0.0], "end_s": [0.5], "chunk": [1],
            "rows": [4], "idle": [["cpu:0", "tail", 0.5, 1.0]], "deferred": []}  # fmt: skip


def every_kind(events, steps):
    """An engine's events of so many steps, of every kind that is stored."""
    told = [events.started(1)]
    for step in range(1, steps + 1):
        envelope = {"producer": "engine", "time": 1.0, "step": step}
        told += [
            events.step(len(told) + 1, step, **{"critic/score/mean": step / 10, "m": float(step)}),
            spans(len(told) + 2, step),
            {"kind": "samples", "seq": len(told) + 3, "samples": [sample(step)], **envelope},
            {
                "kind": "decision",
                "seq": len(told) + 4,
                "controller": "chunk",
                "old": 8,
                "new": 16,
                "reason": "faster",
                **envelope,
            },
        ]
    return told


def tell_everything(worker, attempt_id, events, steps=6):
    assert worker.send_events(attempt_id, every_kind(events, steps)).status_code == 200
    line = {"kind": "log", "producer": "supervisor", "seq": 1, "time": 1.0, "stream": "stdout", "lines": ["one", "two"]}
    assert worker.send_events(attempt_id, [line], "supervisor").status_code == 200


def register(worker, run, attempt_id, step, write=True):
    url = f"{artifact_url(run.pk)}/checkpoints/step-{step:08d}"
    if write:
        file_url_path(url).mkdir(parents=True)
        (file_url_path(url) / "weights").write_bytes(b"w" * 1000)
    told = {"epoch": 1, "step": step, "url": url, "manifest_sha256": "0" * 64, "bytes": 1000}
    assert worker.attempt(attempt_id, "checkpoints", told).status_code == 200


def end(worker, attempt_id, outcome="succeeded"):
    assert worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": outcome, "reason": "done"}).status_code == 200


def run_round():
    """A round of everything that the housekeeper does: its own, and then the deletion thread's."""
    rounds.run_round()
    rounds.run_deletions()

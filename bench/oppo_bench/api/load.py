"""Fills the database for `oppo bench api`: many runs, some of them queued, a few with data of every kind."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from oppo_bench.telemetry import load as load

if TYPE_CHECKING:
    from oppo_platform.runs.models import Run

RUNS, METRICS = 10_000, 40
DETAILED, WAITING = 10, 100
STEPS, SAMPLED_STEPS, LINES, DECIDED, TRACED, DEVICES = 10_000, 500, 20_000, 400, 40, 8
KEYS = ["critic/score/mean", "timing_s/step", *(f"actor/metric_{n}" for n in range(METRICS - 2))]
SPEC = {
    "name": "bench", "steps": 100, "models": {"actor": {"tiny": {"context": 1024}}, "reward": {"rule": "letters:score"}},
    "data": {"prompts": "letters"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dataset:
    """Ids of the runs with much data, and a spec to submit."""

    detailed: list[int]
    spec: dict[str, Any]


def dataset(owner: load.Tenant, scale: int) -> Dataset:
    """10,000 ended runs with 40 metrics, 100 queued, and 10 with long histories; all divided by `scale`.

    The tables are analyzed, as the server does by itself within a minute.
    """
    from django.db import connection

    from oppo_platform.cluster.models import CatalogueItem, Device

    CatalogueItem.objects.create(node=owner.node, entry_id="letters", kind="prompts", bytes=1000, rows=10)
    Device.objects.create(node=owner.node, index=0, kind="cpu", model="m", memory_bytes=1 << 40)
    load.runs(owner, RUNS // scale - DETAILED - WAITING // scale, KEYS)
    load.runs(owner, WAITING // scale, [], "queued")
    detailed = load.runs(owner, DETAILED, KEYS, "running")
    for number, run in enumerate(detailed):
        _write_events(run, number, scale)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return Dataset([run.pk for run in detailed], SPEC)


def _write_events(run: Run, seed: int, scale: int) -> None:
    """Series, spans, answers, log lines and decisions of one run."""
    attempt, steps = run.attempts.get(), STEPS // scale
    reward, step_s, *others = load.walks(seed, 20, steps)
    columns = {KEYS[0]: reward, KEYS[1]: abs(step_s)} | dict(zip(KEYS[2:], others, strict=False))
    load.keep_history(attempt, columns)
    load.keep_timeline(attempt, TRACED, DEVICES)
    _keep_texts(attempt, scale)


def _keep_texts(attempt: Any, scale: int) -> None:
    from oppo_platform import clock
    from oppo_platform.telemetry.models import Decision, LogLine, SampleRow

    now = clock.now()
    SampleRow.objects.bulk_create(
        (
            SampleRow(attempt=attempt, step=step, data=_sample(step, n))
            for step in range(SAMPLED_STEPS // scale)
            for n in range(4)
        ),
        batch_size=500,
    )
    LogLine.objects.bulk_create(
        (
            LogLine(attempt=attempt, stream="stdout", text=f"step {n}: reward 0.731, 1.52 s", time=now + timedelta(seconds=n))
            for n in range(LINES // scale)
        ),
        batch_size=2000,
    )
    Decision.objects.bulk_create(
        Decision(attempt=attempt, step=n, controller="chunk", old=8, new=16, reason="16 is faster by 3 %", at=now)
        for n in range(DECIDED // scale)
    )


def _sample(step: int, number: int) -> dict[str, Any]:
    words = f"the letters of step {step} are many, and so are those of answer {number}; "
    return {
        "sequence_id": 4 * step + number, "prompt": words, "response": 8 * words, "stale_response": "", "score": (step % 97) / 97,
        "kl": 0.1, "length": 128, "age": number % 3, "versions": [step, step], "ending": "eos",
    }  # fmt: skip

"""Runs with long histories for `oppo bench telemetry`: a team, its runs, and series of random walks.

Measured ingest goes through HTTP like a worker's; histories that are only read are written by the same code below HTTP, and
compacted like the housekeeper does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from oppo_platform.runs.models import Attempt, Run

SECONDS_A_STEP, TOKENS_A_STEP = 1.5, 4096
BATCH = 1000  # events, as a supervisor sends them
POINTS_A_ROW = 4096
SAMPLES_A_STEP = 50
CHUNKS = 12  # per step, of decoding and of scoring


@dataclass(frozen=True, slots=True)
class Tenant:
    """A team and a user who may read its runs."""

    token: str
    project: Any
    user: Any
    node: Any


def create_tenant() -> Tenant:
    """Create a team with a project, a user with an API token, and a node."""
    from oppo_contract.wire import WIRE_VERSION
    from oppo_platform import clock
    from oppo_platform.accounts.api_tokens import create_api_token
    from oppo_platform.accounts.models import Membership, Role, Team, User
    from oppo_platform.cluster.models import Node, Pool
    from oppo_platform.projects.models import Project

    now = clock.now()
    team, user = Team.objects.create(name="bench", created_at=now), User.objects.create_user("bench", "bench@example.org")
    Membership.objects.create(team=team, user=user, role=Role.OWNER)
    node = Node.objects.create(
        name="bench", hostname="host", cpus=64, memory_bytes=1 << 40, queue="bench", joined_at=now,
        pool=Pool.objects.create(name="bench", created_at=now), last_seen_at=now + timedelta(days=1), wire_version=WIRE_VERSION,
    )  # fmt: skip
    project = Project.objects.create(team=team, name="bench", created_at=now)
    return Tenant(create_api_token(user, team, "bench").text, project, user, node)


def runs(owner: Tenant, count: int, keys: Sequence[str], state: str = "succeeded") -> list[Run]:
    """Runs with one attempt each; `keys` are their metrics."""
    from oppo_contract.spec import RunSpec
    from oppo_platform import clock
    from oppo_platform.runs.models import Attempt, AttemptState, Run

    now, chance = clock.now(), random.Random(0)
    spec = RunSpec.model_validate(
        {"name": "bench", "steps": 10_000, "models": {"actor": {"tiny": {"context": 1024}}, "reward": {"rule": "letters:score"}},
         "data": {"prompts": "letters"}}
    ).model_dump(mode="json")  # fmt: skip
    made = Run.objects.bulk_create((
        Run(
            project=owner.project, user=owner.user, name=f"run {n}", spec=spec, spec_version=1, preset="oppo", devices=1,
            needs={"kind": "cpu", "models": [], "prompts": []}, priority=50, created_at=now, queued_at=now, total_steps=10_000,
            state=state, cursor=1, epochs=1, step=1, latest={key: chance.gauss(0, 1) for key in keys},
        )
        for n in range(count)
    ), batch_size=1000)  # fmt: skip
    Attempt.objects.bulk_create((
        Attempt(
            run=run, epoch=1, node=owner.node, created_at=now, lease_expires_at=now + timedelta(days=1), first_step=1,
            state=AttemptState.RUNNING if state == "running" else AttemptState.ENDED,
        )
        for run in made
    ), batch_size=1000)  # fmt: skip
    return made


def attempt_token(run: Run) -> tuple[int, str]:
    """(attempt, token) for a run's only attempt."""
    from oppo_platform.tokens import new_token

    attempt, token = run.attempts.get(), new_token("attempt")
    attempt.token_prefix, attempt.token_digest = token.prefix, token.digest
    attempt.save()
    return attempt.pk, token.text


def walks(seed: int, count: int, length: int) -> NDArray[np.float64]:
    """(count, length) random walks in float64."""
    import numpy as np

    return np.cumsum(np.random.default_rng(seed).normal(size=(count, length)), axis=1)


def keep_history(attempt: Attempt, columns: Mapping[str, NDArray[np.float64]]) -> None:
    """Write series of one attempt with its axes, one point per step from step 1 on, and compact them."""
    import numpy as np

    from oppo_platform.telemetry import blocks
    from oppo_platform.telemetry.compaction import compact
    from oppo_platform.telemetry.models import HotPoints, Series

    length = len(next(iter(columns.values())))
    steps = np.arange(1, length + 1, dtype=np.int32)
    axes = {"@wall": SECONDS_A_STEP * steps, "@tokens": float(TOKENS_A_STEP) * steps, "@gpu_seconds": SECONDS_A_STEP * steps}
    rows = []
    for key, values in {**axes, **columns}.items():
        series = Series.objects.create(attempt=attempt, key=key)
        for start in range(0, length, POINTS_A_ROW):
            part = slice(start, start + POINTS_A_ROW)
            data = blocks.pack_points(steps[part], values[part])
            rows.append(HotPoints(series=series, first_step=steps[part][0], last_step=steps[part][-1], data=data))
    HotPoints.objects.bulk_create(rows, batch_size=500)
    compact(attempt.pk)


def keep_timeline(attempt: Attempt, steps: int, devices: int) -> None:
    """Spans of some steps on some devices: chunks of decoding and scoring with bubbles between them, and an update."""
    from oppo_platform.telemetry.models import SpanBatch
    from oppo_platform.telemetry.timeline_downsampling import pack_downsampled

    chance = random.Random(0)
    rows = [
        SpanBatch(attempt=attempt, step=step, data=data, far=pack_downsampled(data))
        for step in range(1, steps + 1)
        for data in [_spans(step, devices, chance)]
    ]
    SpanBatch.objects.bulk_create(rows, batch_size=100)


def _spans(step: int, devices: int, chance: random.Random) -> dict[str, Any]:
    """One step as a `SpansEvent`."""
    columns: dict[str, list[Any]] = {name: [] for name in ("device", "role", "phase", "start_s", "end_s", "chunk", "rows")}
    idle: list[list[Any]] = []
    begin, chunk_s = SECONDS_A_STEP * (step - 1), 0.7 * SECONDS_A_STEP / CHUNKS
    for number in range(devices):
        device, actor = f"cuda:{number}", number < devices // 2
        for chunk in range(CHUNKS):
            start = begin + chunk * chunk_s
            end = start + chunk_s * chance.uniform(0.5, 1.0)
            span = (device, "actor" if actor else "reward", "decode" if actor else "score", start, end, chunk + 1, 64)
            for name, value in zip(columns, span, strict=True):
                columns[name].append(value)
            idle.append([device, chance.choice(("decode", "tail", "score")), end, start + chunk_s])
        span = (device, "actor", "update-actor", begin + 0.7 * SECONDS_A_STEP, begin + 0.95 * SECONDS_A_STEP, 0, 64)
        for name, value in zip(columns, span, strict=True):
            columns[name].append(value)
        idle.append([device, "weights", begin + 0.95 * SECONDS_A_STEP, begin + SECONDS_A_STEP])
    more = {"window_s": [begin, begin + SECONDS_A_STEP], "deferred": [], "flows": [], "counters": {}, "trained": []}
    return {"step": step, **columns, "idle": idle, **more}


def batches(columns: Mapping[str, NDArray[np.float64]]) -> list[bytes]:
    """The bodies that a supervisor sends for these steps."""
    keys, table = list(columns), list(zip(*(values.tolist() for values in columns.values()), strict=True))
    events = [
        {
            "kind": "step", "producer": "engine", "seq": n, "time": 1e9 + n, "step": n, "elapsed_s": SECONDS_A_STEP * n,
            "generated_tokens": TOKENS_A_STEP * n, "device_seconds": SECONDS_A_STEP * n,
            "metrics": dict(zip(keys, row, strict=True)),
        }
        for n, row in enumerate(table, start=1)
    ]  # fmt: skip
    return [
        json.dumps({"producer": "engine", "events": events[start : start + BATCH]}).encode()
        for start in range(0, len(events), BATCH)
    ]


def keep_samples(attempt: Attempt, count: int, seed: int) -> None:
    """Write trained samples of one attempt, 50 a step, and vacuum as the database does by itself after a while."""
    from django.db import connection

    from oppo_platform.telemetry.models import SampleRow

    SampleRow.objects.bulk_create(
        (
            SampleRow(attempt=attempt, step=1 + data["sequence_id"] // SAMPLES_A_STEP, data=data)
            for data in random_samples(count, seed)
        ),
        batch_size=2000,
    )
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM ANALYZE {SampleRow._meta.db_table}")


def random_samples(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Trained samples of about 60 words each; each prompt comes back every 1,000 samples."""
    chance = random.Random(seed)

    def words(length: int) -> str:
        return " ".join(f"word{chance.randrange(500)}" for _ in range(length))

    prompts = [words(15) for _ in range(SAMPLES_A_STEP * 20)]
    for n in range(count):
        yield {
            "sequence_id": n, "prompt": prompts[n % len(prompts)], "messages": None, "response": words(45),
            "stale_response": "", "score": chance.gauss(0, 1), "kl": chance.random(), "length": chance.randrange(1, 400),
            "age": 0, "versions": [1, 1], "held_out": False, "ending": chance.choice(("eos", "length")),
        }  # fmt: skip

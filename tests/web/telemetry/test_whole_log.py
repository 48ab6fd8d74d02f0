"""Whatever the network does to batches, whenever supervisors die or series are sealed: what is stored equals the engine's log."""

from __future__ import annotations

import json
import math
from itertools import count
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oppo_contract.wire import Claimed
from oppo_core.reporting.event_log import Journal
from oppo_platform.runs.models import Attempt
from oppo_platform.telemetry.compaction import compact
from oppo_platform.telemetry.metric_reader import EVERYTHING, attempt_ranges, read_points
from oppo_platform.telemetry.models import ProducerMark
from worker import uploader as shipping_module
from worker.folders import AttemptFolder, SavedClaim
from worker.platform_api import PlatformApi
from worker.uploader import Uploader

FINE, LOST, REPLY_LOST, TWICE, LATE = "fine", "lost", "reply lost", "twice", "late"
FATES = st.lists(st.sampled_from([FINE, LOST, REPLY_LOST, TWICE, LATE]), max_size=6)
VALUES = st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))
# A supervisor's life: what the engine writes meanwhile, what the network does, and whether the housekeeper comes by afterwards.
LIVES = st.lists(st.tuples(st.lists(VALUES, max_size=30), FATES, st.booleans()), min_size=1, max_size=6)


class Network(httpx.BaseTransport):
    """Carries requests to the platform, as the fates will; when they are used up, faithfully."""

    def __init__(self, client: Any, fates: list[str]) -> None:
        self.client, self.fates, self.delayed = client, list(fates), []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        fate = self.fates.pop(0) if self.fates else FINE
        if fate == LOST:
            raise httpx.ConnectError("lost on the way")
        reply = self.deliver(request)
        if fate == TWICE:
            reply = self.deliver(request)
        if fate == LATE:
            self.delayed.append(request)
        if fate == REPLY_LOST:
            raise httpx.ReadTimeout("the reply was lost")
        return reply

    def deliver(self, request: httpx.Request) -> httpx.Response:
        headers = {"Authorization": request.headers["Authorization"]}
        told = self.client.post(request.url.path, request.content, content_type="application/json", headers=headers)
        return httpx.Response(told.status_code, headers=dict(told.headers), content=told.content)

    def arrive_late(self) -> None:
        """What was held up somewhere comes once more, the newest first."""
        while self.delayed:
            self.deliver(self.delayed.pop())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "BATCH_INTERVAL_S", "FIRST_WAIT_S", "MAX_WAIT_S"):
        monkeypatch.setattr(shipping_module, name, 0.0)


def told_in(folder: AttemptFolder) -> dict[str, dict[int, float]]:
    """The engine's log: metric → step → value, None where it is no number."""
    log: dict[str, dict[int, float]] = {}
    for line in folder.engine_events.read_text().splitlines():
        event = json.loads(line)
        for key, value in event["metrics"].items():
            log.setdefault(key, {})[event["step"]] = math.nan if value is None else float(value)
    return log


def stored(run: Any) -> dict[str, dict[int, float]]:
    run.refresh_from_db()
    found = read_points({run.pk: attempt_ranges(run)}, ["a", "b"], EVERYTHING)
    return {key: dict(zip(steps.tolist(), values.tolist(), strict=True)) for (_, key), (steps, values) in found.items()}


def same(log: dict[str, dict[int, float]], other: dict[str, dict[int, float]]) -> bool:
    """Step by step, bit by bit; no number equals no number."""
    return log.keys() == other.keys() and all(
        log[key].keys() == other[key].keys()
        and np.array_equal([log[key][step] for step in log[key]], [other[key][step] for step in log[key]], equal_nan=True)
        for key in log
    )


names = count(1)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=LIVES)
def test_stored_log_equals_the_engines_output(world, tmp_path_factory, impatient, lives):
    worker = world.worker(f"node{next(names)}")
    run, attempt_id = world.start(worker)
    folder = AttemptFolder(tmp_path_factory.mktemp("attempts") / str(attempt_id))
    journal = Journal(folder.engine_events)
    token = worker.attempt_tokens[attempt_id]
    claimed = Claimed(
        attempt_token=token, run_id=run.pk, spec={}, device_indices=[0], lease_s=60, artifact_url=f"file://{folder.path}"
    )
    steps = count(1)
    for values, fates, comes_by in lives:
        for value in values:
            step = next(steps)
            journal.write(
                "step",
                step=step,
                elapsed_s=float(step),
                generated_tokens=step,
                device_seconds=1.0,
                metrics={"a": value, "b": step},
            )
        api = PlatformApi("http://platform", token)
        api._http = httpx.Client(
            transport=(network := Network(worker.client, fates)), base_url=api._http.base_url, headers=api._http.headers
        )
        ship = Uploader(folder, SavedClaim(epoch=1, claimed=claimed), api, on_started=lambda: None)
        ship.close()
        ship.run()  # until everything is acknowledged; the next life reads the outbox from its beginning
        network.arrive_late()
        if comes_by:
            compact(attempt_id)
        assert same(told_in(folder), stored(run))
    mark = ProducerMark.objects.filter(attempt_id=attempt_id, producer="engine").first()
    assert (mark.high_water if mark else 0) == next(steps) - 1
    Attempt.objects.filter(pk=attempt_id).update(state="failed")

"""The whole control plane under seeds: real scheduler, services and ingest; simulated nodes, bus, calls and clocks (`plane/`)."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import pytest
from django.db import connection, transaction
from django.test import override_settings

from oppo_platform import clock
from oppo_platform.clock import ManualClock, use_clock
from oppo_platform.cluster import services as cluster
from oppo_platform.cluster.models import DeviceState
from oppo_platform.runs import attempts, lifecycle
from oppo_platform.runs.models import Allocation, Attempt
from oppo_platform.scheduling import cycle, dispatch, liveness, wait_reasons
from oppo_platform.telemetry import ingest
from oppo_platform.telemetry.models import ProducerMark
from oppo_platform.usecases import node_heartbeat
from tests.web.plane import network
from tests.web.plane.simulation import SETTINGS, ControlPlane

QUICK, FULL = 24, 1000
START = datetime(2026, 11, 2, 8, 0, tzinfo=UTC)
GIVEN = os.environ.get("OPPO_PLANE_SEED")
SEEDS = [*range(QUICK), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(QUICK, FULL))]
if GIVEN:
    SEEDS = [int(GIVEN)]


def simulate(seed: int, monkeypatch: pytest.MonkeyPatch, *, aloud: bool = False) -> ControlPlane:
    """One simulation from its beginning to its rest; nothing of it stays in the database."""
    manual = ManualClock(START)
    shared = bool(seed % 2)
    with use_clock(manual), override_settings(**SETTINGS, OPPO_ARTIFACTS_SHARED=shared), transaction.atomic():
        count_from_one()
        plane = ControlPlane(seed, manual, aloud=aloud)
        monkeypatch.setattr(dispatch, "broker", lambda url: plane.bus)
        plane.run()
        transaction.set_rollback(True)
    return plane


def count_from_one():
    """Ids begin at 1: what hangs on their order, or on sets of them, is the same whatever ran before."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT sequencename FROM pg_sequences WHERE schemaname = 'public'")
        for (name,) in cursor.fetchall():
            cursor.execute(f'ALTER SEQUENCE "{name}" RESTART')


@pytest.mark.django_db
@pytest.mark.parametrize("seed", SEEDS)
def test_every_run_ends_or_waits_with_a_reason(seed, monkeypatch):
    """OPPO_PLANE_SEED=17 replays one seed and tells every step."""
    simulate(seed, monkeypatch, aloud=bool(GIVEN))


def careless_claim(node, attempt_id, epoch, address):
    """Without the compare-and-set: whoever asks, and however late, gets it."""
    try:
        return real_claim(node, attempt_id, epoch, address)
    except attempts.AttemptRefused:
        attempt = Attempt.objects.select_related("run", "resume_from").get(pk=attempt_id)
        indices = list(attempt.allocations.values_list("device__index", flat=True))
        return attempts._claimed(attempt.run, attempt, "token", node).model_copy(update={"device_indices": indices})


def keeps_devices(attempt, state, outcome, reason, exit_code=None, reporter=None):
    """Ends an attempt and forgets its devices."""
    attempts._write(
        attempt, attempt.epoch, state=state, outcome=outcome, reason=reason, ended_at=clock.now(), exit_code=exit_code
    )


def trusting_fence(attempt_id, outcome, cause, actor, devices, *node):
    """Gives the devices of a silent attempt away at once."""
    return real_fence(attempt_id, outcome, cause, actor, DeviceState.READY, *node)


def knows_the_head_only(attempt):
    """Gives the devices of an attempt's further nodes away at once when it ends."""
    return real_claimed_nodes(attempt) & {attempt.node_id}


def deaf_to_reports(node_id, reported):
    """Takes an attempt away although its node says that it is there."""
    return real_give_up(node_id, set())


def forgets_what_it_has(attempt_id, producer, events, rank):
    """Applies a batch whatever was applied before."""
    ProducerMark.objects.filter(attempt_id=attempt_id, producer=producer).update(high_water=events[0].seq - 1)
    return real_ingest(attempt_id, producer, events, rank)


def settles_again(now):
    """Adds what it has added before."""
    Allocation.objects.filter(released_at__isnull=False).update(settled=False)
    return real_settle(now)


real_claimed_nodes = attempts.claimed_nodes
real_claim, real_fence, real_give_up = attempts.claim, attempts.fence, node_heartbeat.fence_orphans
real_ingest, real_settle, real_note = ingest.ingest, cycle.settle, cluster.update_devices
# What is broken: where, how, and a seed that finds it (if it does not any more, others are tried).
BROKEN = {
    "a claim without compare-and-set": ([(attempts, "claim", careless_claim)], 32),
    "an end that keeps devices": ([(attempts, "end_attempt", keeps_devices), (lifecycle, "end_attempt", keeps_devices)], 0),
    "a fence that trusts the silent": ([(liveness, "fence", trusting_fence)], 28),
    "an end that forgets the further nodes": ([(attempts, "end_launches", lambda attempt, silent, now: None)], 7),
    "an end that knows of the head only": ([(attempts, "claimed_nodes", knows_the_head_only)], 13),
    "a report that clears fenced devices": ([(cluster, "update_devices", lambda n, k, r, clear: real_note(n, k, r, True))], 33),
    "orphans that are none": ([(node_heartbeat, "fence_orphans", deaf_to_reports)], 28),
    "a wish that waits for nobody": ([(lifecycle, "_request_stop", lambda attempt, within_s: False)], 96),
    "events applied twice": ([(network, "ingest", forgets_what_it_has)], 20),
    "usage settled twice": ([(cycle, "settle", settles_again)], 0),
    "a cycle that gives no reasons": ([(wait_reasons, "_store_reasons", lambda decisions, changed, now, known: {})], 0),
}


@pytest.mark.django_db
@pytest.mark.parametrize("what", BROKEN)
def test_broken_service_is_detected(what, monkeypatch):
    places, likely = BROKEN[what]
    for module, name, broken in places:
        monkeypatch.setattr(module, name, broken)
    for seed in (likely, *range(100)):
        try:
            simulate(seed, monkeypatch)
        except AssertionError as found:
            assert f"seed {seed}, step" in str(found)  # noqa: PT017 - the message is what is looked at
            assert isinstance(found.__cause__, AssertionError), found  # noqa: PT017 - a law, not a breakage that cannot be called
            return
    pytest.fail(f"no seed below 100 finds {what}")

"""What a restore settles in the database that it has filled, whatever the attempts were about to do."""

from __future__ import annotations

import pytest

from oppo_platform.accounts.models import Invite, LoginLink, PasswordLink
from oppo_platform.backup.post_restore import invalidate_stale_state
from oppo_platform.cluster.models import Device, DeviceState, JoinToken
from oppo_platform.runs.lifecycle import cancel_run, pause_run
from oppo_platform.runs.models import Allocation, Attempt
from tests.web.runs.two_node_run import Pair

CAUSE = "The platform was restored from its backup of 2026-11-01 12:00 UTC."


def settled(world) -> int:
    """As long after the backup as it takes: what is settled is of the backup's moment."""
    at = world.clock.now()
    world.clock.advance(3 * 24 * 3600)
    return invalidate_stale_state(at, "b.tar")


def test_a_run_that_was_allocated_waits_and_nothing_was_lost(world) -> None:
    world.worker()
    run = world.submit()
    world.cycle()
    assert settled(world) == 1
    run.refresh_from_db()
    assert (run.state, run.reason) == ("queued", f"{CAUSE} No progress was lost.")
    assert run.attempts.get().outcome == "unclaimed"
    assert invalidate_stale_state(world.clock.now(), "b.tar") == 0, "nothing is left to be settled"


@pytest.mark.parametrize(("wish", "state"), [(pause_run, "paused"), (cancel_run, "cancelled"), (None, "queued")])
def test_requests_before_the_backup_are_applied(world, wish, state) -> None:
    run, attempt_id = world.start(world.worker())
    if wish is not None:
        wish(run.pk, "user:ada")
    settled(world)
    run.refresh_from_db()
    assert run.state == state
    assert Attempt.objects.get(pk=attempt_id).outcome == "restored"


def test_restored_attempt_does_not_count_as_a_failure(world) -> None:
    worker = world.worker()
    run, _ = world.start(worker, retries={"attempts": 1})
    settled(world)
    run.refresh_from_db()
    assert (run.state, run.not_before) == ("queued", None)
    assert run.reason == f"{CAUSE} Restarts from step 0."


def test_both_nodes_of_an_attempt_are_asked_before_their_devices_are_given_away(world, settings) -> None:
    settings.OPPO_ARTIFACTS_SHARED = True
    pair = Pair(world)
    pair.train()
    assert settled(world) == 1
    assert pair.states() == ("queued", "fenced", "ended")
    assert pair.held() == []
    assert [pair.device(worker) for worker in (pair.head, pair.other)] == ["unknown", "unknown"]
    for worker in (pair.head, pair.other):
        assert pair.beat(worker).json()["reason"] == "lease_lost"
        worker.heartbeat()
        assert pair.device(worker) == "ready"


def test_devices_that_are_out_of_service_stay_so_and_idle_ones_are_asked(world) -> None:
    world.worker("a", devices=3)
    kept = {0: DeviceState.QUARANTINED, 1: DeviceState.GONE}
    for index, state in kept.items():
        Device.objects.filter(index=index).update(state=state)
    settled(world)
    assert dict(Device.objects.values_list("index", "state")) == {**kept, 2: DeviceState.UNKNOWN}


def test_use_of_devices_ends_with_the_backup(world) -> None:
    world.start(world.worker())
    at = world.clock.now()
    settled(world)
    assert Allocation.objects.get().released_at == at


def test_one_time_links_are_void(world) -> None:
    from oppo_platform.accounts.services import create_login_link

    create_login_link(world.people["ada"])
    assert JoinToken.objects.filter(revoked_at=None).exists()
    settled(world)
    assert not LoginLink.objects.filter(used_at=None).exists()
    for kind in (Invite, PasswordLink):
        assert not kind.objects.filter(used_at=None, revoked_at=None).exists()
    assert not JoinToken.objects.filter(revoked_at=None).exists()

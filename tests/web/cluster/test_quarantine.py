"""A device counts as free only when its node has nothing against it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_platform.accounts.models import AuditEntry
from oppo_platform.cluster.models import Device, DeviceState
from oppo_platform.cluster.services import device_state, put_back

LEFT = "leftover processes: 4711 (python3)"
ECC = "uncorrectable ECC memory errors since the last reset"


def report(worker, health="", attempts=()):
    devices = [{"index": 0, "kind": "cuda", "model": "m", "memory_bytes": 1, "health": health}]
    running = [{"attempt_id": a, "epoch": 1} for a in attempts]
    reply = worker.post("heartbeat", {"devices": devices, "attempts": running}, worker.token)
    assert reply.status_code == 200, reply.content


def test_a_device_with_something_left_on_it_is_given_to_nobody_until_it_is_gone(world):
    worker = world.worker(kind="cuda")
    report(worker, LEFT)
    run = world.submit()
    world.cycle()
    run.refresh_from_db()
    assert (run.state, Device.objects.get().state) == ("queued", "quarantined")
    ada = world.login("ada")
    assert "quarantined" in ada.get("/queue").content.decode()
    assert LEFT in ada.get("/sharing").content.decode()
    report(worker)
    world.cycle()
    run.refresh_from_db()
    assert (run.state, Device.objects.get().state) == ("allocated", "ready")


def test_a_card_that_its_driver_has_lost_stays_the_card_that_it_was(world):
    worker = world.worker(kind="cuda")
    report(worker)
    lost = {
        "index": 0,
        "kind": "cuda",
        "model": "",
        "memory_bytes": 0,
        "health": "the driver cannot access the device: GPU is lost",
    }
    assert worker.post("heartbeat", {"devices": [lost], "attempts": []}, worker.token).status_code == 200
    device = Device.objects.get()
    assert (device.state, device.model, device.memory_bytes) == ("quarantined", "m", 1)


def test_an_administrator_puts_it_back_until_its_node_says_something_else(world):
    worker = world.worker(kind="cuda")
    report(worker, ECC)
    device = Device.objects.get()
    ada, eve = world.login("ada"), world.login("eve")
    world.people["ada"].is_staff = True
    world.people["ada"].save()
    assert eve.post(f"/sharing/devices/{device.pk}/put-back").status_code == 403
    assert ada.post(f"/sharing/devices/{device.pk}/put-back").status_code == 302
    entry = AuditEntry.objects.get(action="device.put_back")
    assert (entry.actor, entry.target) == ("user:ada", "node1/cuda:0")

    def state():
        return Device.objects.get().state

    assert state() == "ready"
    report(worker, ECC)
    assert state() == "ready"
    report(worker, LEFT)
    assert state() == "quarantined"
    put_back(device.pk)
    report(worker)
    report(worker, LEFT)
    assert state() == "quarantined", "what was well in between is looked at anew"


def test_held_device_may_be_quarantined_and_stays_so_after_the_end(world):
    worker = world.worker(kind="cuda")
    run, attempt_id = world.start(worker)
    report(worker, ECC, [attempt_id])
    run.refresh_from_db()
    assert (run.state, Device.objects.get().state) == ("running", "quarantined")
    worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": "succeeded", "reason": "done"})
    second = world.submit()
    world.cycle()
    second.refresh_from_db()
    assert second.state == "queued"


@given(st.sampled_from(DeviceState.values), st.sampled_from(["", LEFT, ECC]), st.sampled_from(["", LEFT, ECC]), st.booleans())
def test_a_device_is_ready_only_when_nothing_speaks_against_it(old, health, waived, clear):
    state = device_state(old, health, waived, clear=clear)
    if state == DeviceState.READY:
        assert health in ("", waived)
        assert clear or old == DeviceState.READY
    assert (state == DeviceState.QUARANTINED) == bool(health and health != waived)


@pytest.mark.parametrize("length", [501, 10_000])
def test_a_long_complaint_is_refused(world, length):
    worker = world.worker(kind="cuda")
    devices = [{"index": 0, "kind": "cuda", "model": "m", "memory_bytes": 1, "health": "x" * length}]
    assert worker.post("heartbeat", {"devices": devices, "attempts": []}, worker.token).status_code == 422

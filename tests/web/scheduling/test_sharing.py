"""Pools, quotas, drained nodes, and what teams have used."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_platform.accounts.models import AuditEntry
from oppo_platform.cluster.models import Node, Pool
from oppo_platform.cluster.pools import PoolError, drain, move_node, rename_pool, undrain
from oppo_platform.runs.models import Allocation
from oppo_platform.scheduling.models import Usage
from oppo_platform.scheduling.quotas import QuotaError, pool_quotas, set_quota, set_weight
from oppo_platform.scheduling.usage import decayed_seconds, decayed_usage, settle, weekly_usage

HALF_LIFE_S = 7 * 24 * 3600.0


def test_a_node_joins_the_pool_of_its_devices(world):
    world.worker("a", devices=2, kind="cuda")
    world.worker("b", devices=1, kind="cuda")
    assert list(Pool.objects.values_list("name", flat=True)) == ["m"]
    assert set(Node.objects.values_list("pool__name", flat=True)) == {"m"}
    rename_pool(Pool.objects.get().pk, "  H100   80 GB ")
    world.worker("b").heartbeat(2, "cuda")
    assert Node.objects.get(name="b").pool.name == "H100 80 GB", "a node stays in the pool it is in"
    move_node(Node.objects.get(name="a").pk, "spare")
    assert dict(Node.objects.values_list("name", "pool__name")) == {"a": "spare", "b": "H100 80 GB"}
    with pytest.raises(PoolError, match="named spare already"):
        rename_pool(Pool.objects.get(name="H100 80 GB").pk, "spare")


def test_a_drained_node_gets_no_new_work(world):
    worker = world.worker(devices=2, kind="cuda")
    run, attempt = world.start(worker)
    drain(Node.objects.get().pk, "new driver")
    second = world.submit()
    world.cycle()
    second.refresh_from_db()
    run.refresh_from_db()
    assert (run.state, second.state) == ("running", "queued")
    assert worker.attempt(attempt, "heartbeat", {"epoch": 1, "running": True}).status_code == 200
    undrain(Node.objects.get().pk)
    world.cycle()
    second.refresh_from_db()
    assert second.state == "allocated"


def test_quotas_are_checked_and_told(world):
    world.worker(devices=4, kind="cuda")
    pool = Pool.objects.get()
    set_quota(world.team.pk, pool.pk, 3, 1)
    set_quota(world.other_team.pk, pool.pk, 2, None)
    set_weight(world.team.pk, 2.0)
    world.start(world.worker("second", devices=1, kind="cuda"))
    (told,) = pool_quotas([world.team])
    assert (told["devices"], told["in_use"], told["promised"]) == (5, 1, 5)
    assert told["teams"] == [
        {"team": "Letters", "team_id": world.team.pk, "weight": 2.0, "nominal": 3, "borrow_cap": 1, "in_use": 1}
    ]
    for wrong in (lambda: set_quota(world.team.pk, pool.pk, -1, None), lambda: set_weight(world.team.pk, math.inf)):
        with pytest.raises(QuotaError):
            wrong()


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e7))
def test_fading_is_an_integral(start: float, length: float, since: float) -> None:
    """Two halves make the whole, a very long half-life counts plain seconds, and nothing counts more than it lasted."""
    begin, end = start, start + length
    now, middle = end + since, begin + length / 2
    whole = decayed_seconds(begin, end, now, HALF_LIFE_S)
    assert whole == pytest.approx(
        decayed_seconds(begin, middle, now, HALF_LIFE_S) + decayed_seconds(middle, end, now, HALF_LIFE_S), abs=1e-3
    )
    assert -1e-6 <= whole <= length + 1e-3
    assert decayed_seconds(begin, end, now, 1e12) == pytest.approx(length, rel=1e-3, abs=1e-3)


def test_released_devices_are_settled_once(world):
    worker = world.worker()
    _, attempt = world.start(worker)
    world.clock.advance(HALF_LIFE_S)
    worker.attempt(attempt, "heartbeat", {"epoch": 1, "running": True})
    before = decayed_usage(world.clock.now())[world.team.pk]
    assert before == pytest.approx(HALF_LIFE_S / math.log(2) / 2)
    told = {"epoch": 1, "outcome": "succeeded", "exit_code": 0, "reason": ""}
    assert worker.attempt(attempt, "outcome", told).status_code == 200
    assert settle(world.clock.now()) == 1
    assert settle(world.clock.now()) == 0
    assert decayed_usage(world.clock.now())[world.team.pk] == pytest.approx(before)
    world.clock.advance(HALF_LIFE_S)
    assert decayed_usage(world.clock.now())[world.team.pk] == pytest.approx(before / 2)
    assert Usage.objects.get().team == world.team


def test_settling_at_once_counts_nothing_twice(world, at_once):
    worker = world.worker(devices=3, kind="cuda")
    attempts = [world.start(worker)[1] for _ in range(3)]
    world.clock.advance(100)
    for attempt in attempts:
        told = {"epoch": 1, "outcome": "succeeded", "exit_code": 0, "reason": ""}
        assert worker.attempt(attempt, "outcome", told).status_code == 200
    results = at_once(*[lambda: settle(world.clock.now())] * 4)
    assert sum(results) == 3, results
    assert Usage.objects.get().device_seconds == pytest.approx(300, rel=1e-3)
    assert not Allocation.objects.filter(settled=False).exists()


def test_device_hours_by_week(world):
    """Sunday 1 November 2026, 12:00: an allocation over midnight counts in both weeks."""
    world.start(world.worker())
    world.clock.advance(3600 * 36)
    told = weekly_usage(world.team, world.clock.now())
    assert told == [
        {"week": "2026-10-26", "pool": "m", "device_hours": pytest.approx(12.0)},
        {"week": "2026-11-02", "pool": "m", "device_hours": pytest.approx(24.0)},
    ]
    assert weekly_usage(world.other_team, world.clock.now()) == []


def test_everybody_sees_their_own_share(world):
    world.start(world.worker())
    page = world.login("vic").get("/sharing").content.decode()
    assert "Letters" in page
    assert "Others" not in page
    assert "Drain" not in page
    assert world.login("eve").get("/sharing").content.decode().count("Letters") == 0


def test_administrators_set_quotas_and_drain_nodes(world):
    world.worker(devices=4, kind="cuda")
    pool, node, ada = Pool.objects.get(), Node.objects.get(), world.people["ada"]
    ada.is_staff = True
    ada.save()
    browser = world.login("ada")
    assert "Others" in browser.get("/sharing").content.decode()
    quota = f"/sharing/pools/{pool.pk}/teams/{world.team.pk}"
    reply = browser.post(quota, {"nominal": "3", "borrow_cap": "", "weight": "2"}, follow=True)
    assert "Letters now has a guaranteed quota of 3 devices in m." in reply.content.decode()
    assert "Enter an integer number of guaranteed devices." in browser.post(quota, {"nominal": "x"}, follow=True).content.decode()
    browser.post(f"/sharing/nodes/{node.pk}/drain", {"reason": "new <driver>"})
    assert "new &lt;driver&gt;" in browser.get("/sharing").content.decode()
    browser.post(f"/sharing/nodes/{node.pk}/undrain")
    browser.post(f"/sharing/nodes/{node.pk}/move", {"pool": "spare"})
    node.refresh_from_db()
    assert (node.drained_at, node.pool.name) == (None, "spare")
    assert browser.post(f"/sharing/nodes/{node.pk}/explode").status_code == 404


@pytest.mark.parametrize(
    ("weight", "words"), [("abc", "weight must be a number"), ("0", "weight must be above 0"), ("nan", "above 0")]
)
def test_a_quota_whose_weight_is_refused_stays_as_it_was(world, weight, words):
    world.worker(devices=4, kind="cuda")
    pool, ada = Pool.objects.get(), world.people["ada"]
    ada.is_staff = True
    ada.save()
    set_quota(world.team.pk, pool.pk, 1, 1)
    told = AuditEntry.objects.count()
    posted = {"nominal": "3", "borrow_cap": "2", "weight": weight}
    page = world.login("ada").post(f"/sharing/pools/{pool.pk}/teams/{world.team.pk}", posted, follow=True)
    assert words in page.content.decode()
    (quota,) = pool_quotas([world.team])[0]["teams"]
    assert (quota["nominal"], quota["borrow_cap"], quota["weight"], AuditEntry.objects.count()) == (1, 1, 1.0, told)


@pytest.mark.parametrize("who", ["ben", "max", "ada", "eve"])
def test_only_administrators_change_quotas_and_pools(world, who):
    world.worker()
    pool, node, browser = Pool.objects.get(), Node.objects.get(), world.login(who)
    for path in (f"pools/{pool.pk}", f"pools/{pool.pk}/teams/{world.team.pk}", f"nodes/{node.pk}/drain", f"nodes/{node.pk}/move"):
        assert browser.post(f"/sharing/{path}", {"name": "mine", "nominal": "9", "pool": "mine"}).status_code == 403
    node.refresh_from_db()
    assert (node.drained_at, node.pool.name, Pool.objects.count()) == (None, "m", 1)


def test_request_beyond_quota_and_cap_is_refused_at_submit(world, make_spec):
    world.worker(devices=4, kind="cuda")
    pool, ada = Pool.objects.get(), world.login("ada")
    set_quota(world.team.pk, pool.pk, 0, 0)
    body = {"spec": make_spec(), "project": world.project.pk}
    refused = ada.post("/api/v1/runs", body, content_type="application/json")
    (told,) = refused.json()["errors"]
    assert (refused.status_code, told["path"], told["value"]) == (422, "resources.devices", "1")
    assert "may use at most 0 on pool m" in told["message"]
    checked = ada.post("/api/v1/runs/validate", body, content_type="application/json").json()
    assert [problem["path"] for problem in checked["problems"]] == ["resources.devices"]
    # A stranger to the team may check a spec, but is told nothing of its quota.
    eve = world.login("eve").post("/api/v1/runs/validate", body, content_type="application/json").json()
    assert [problem["path"] for problem in eve["problems"]] == ["project"]
    set_quota(world.team.pk, pool.pk, 0, 1)
    assert ada.post("/api/v1/runs", body, content_type="application/json").status_code == 201

"""What a run has cost: the hours of its devices, all attempts together."""

import pytest
from django.test import Client

from oppo_platform.runs.models import Allocation


@pytest.fixture
def asked(world):
    client = Client()
    client.force_login(world.people["ada"], backend="allauth.account.auth_backends.AuthenticationBackend")
    return lambda run: client.get(f"/api/v1/runs/{run.pk}/usage")


def test_every_device_counts_from_its_allocation_to_its_release(world, clock, asked):
    run, _ = world.start(world.worker(devices=3), resources={"devices": 2})
    assert asked(run).json() == {"device_hours": 0.0, "devices": 2}
    clock.advance(1800)
    assert asked(run).json() == {"device_hours": 1.0, "devices": 2}
    # One device is released: it costs no more, and what it has cost stays.
    first = Allocation.objects.filter(attempt__run=run).first()
    Allocation.objects.filter(pk=first.pk).update(released_at=clock.now())
    clock.advance(3600)
    assert asked(run).json() == {"device_hours": 2.0, "devices": 1}


def test_a_run_that_waits_has_cost_nothing_and_strangers_see_none(world, asked):
    run = world.submit()
    assert asked(run).json() == {"device_hours": 0, "devices": 0}
    assert Client().get(f"/api/v1/runs/{run.pk}/usage").status_code == 401
    run.pk = 10**6
    assert asked(run).status_code == 404

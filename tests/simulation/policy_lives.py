"""What must hold over many plans: nobody starves, nobody is pushed to and fro, what was reserved is kept, bursts do not win."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from oppo_platform.scheduling.policy import PolicySettings, Quota, WaitingRun
from tests.simulation.policy_clusters import node
from tests.simulation.policy_world import Job, World, team

SETTINGS = PolicySettings(half_life_s=20_000.0, submit_penalty_s=100.0, min_runtime_s=60.0, stop_s=10.0, lookahead=10)
LONGEST_S = 300.0


def no_starvation(rng: Random) -> None:
    """Small runs keep coming from everyone, faster than they are served; a gang that needs a whole node, or two, starts anyhow.

    Its wait is bounded: when its team has the lowest share its devices are reserved, and they come free within one longest run.
    """
    wide = rng.random() < 0.3
    world = World([node(i + 1, 4) for i in range(3)], [team(1), team(2), team(3)], SETTINGS)
    gang = WaitingRun(1, 1, 8 if wide else 4, nodes_max=2 if wide else 1, preemptible=False)
    known, number = rng.random() < 0.7, 1
    for step in range(200):
        for _ in range(rng.randint(1, 4)):
            number += 1
            run = WaitingRun(number, rng.randint(1, 3), 1, submitted_at=world.now, preemptible=rng.random() < 0.5)
            world.submit(Job(run, rng.uniform(30, LONGEST_S), known))
        if step == 20:
            world.submit(Job(replace(gang, submitted_at=world.now), 100.0, known))
        world.step(20.0)
        if 1 in world.jobs and world.jobs[1].started_first is not None:
            return
    raise AssertionError("the gang never started")


def owners_get_their_own(rng: Random) -> None:
    """Others borrow everything and have often been preempted: whose quota it is waits for the longest protection at most."""
    quota = rng.randint(1, 8)
    world = World([node(1, 4), node(2, 4)], [team(1, {1: Quota(quota)}), team(2), team(3)], SETTINGS)
    for number in range(10, 30):
        run = WaitingRun(number, rng.randint(2, 3), rng.choice([1, 2, 4]), submitted_at=0.0)
        world.preempted[number] = rng.choice([0, 1, 3, 4, 5, 50])
        world.submit(Job(run, 1e9, known=rng.random() < 0.5))
    for _ in range(rng.randint(1, 40)):
        world.step(10.0)
    world.submit(Job(WaitingRun(1, 1, rng.randint(1, min(4, quota)), submitted_at=world.now), 100.0))
    before = world.now
    while world.jobs[1].started_first is None:
        assert world.now - before <= 8 * SETTINGS.min_runtime_s + SETTINGS.stop_s + 20.0, "whose quota it is was kept waiting"
        world.step(10.0)


def no_ping_pong(rng: Random) -> None:
    """Nobody submits and nothing ends: after a while nobody is preempted any more."""
    teams = [team(i, _quota(rng), rng.choice([0.5, 1.0, 2.0])) for i in (1, 2, 3)]
    world = World([node(i + 1, 4) for i in range(rng.randint(1, 3))], teams, SETTINGS)
    for number in range(1, rng.randint(8, 25)):
        run = WaitingRun(number, rng.randint(1, 3), rng.choice([1, 1, 2, 3, 4]), priority=rng.choice([50, 50, 60]))
        world.submit(Job(run, 1e12, known=False))
        if rng.random() < 0.3:
            world.step(rng.choice([20.0, 100.0]))
    for _ in range(60):
        world.step(rng.choice([20.0, 100.0, 1000.0]))
    before = sum(world.preempted.values())
    for _ in range(60):
        world.step(rng.choice([20.0, 1000.0, 5000.0]))
    assert sum(world.preempted.values()) == before


def reservation_kept_in_time(rng: Random) -> None:
    """With exact estimates and one team, the head starts when it was first promised, whoever is let in front."""
    world = World([node(1, 4), node(2, 4)], [team(1)], SETTINGS)
    number = 100
    for _ in range(rng.randint(6, 10)):
        number += 1
        world.submit(Job(WaitingRun(number, 1, rng.choice([1, 2]), preemptible=False), float(rng.randrange(100, 600, 10))))
    world.step(10.0)
    world.submit(Job(WaitingRun(1, 1, 4, submitted_at=-1.0), 200.0))
    for _ in range(90):
        for _ in range(rng.randint(0, 2)):
            number += 1
            length = float(rng.randrange(10, 400, 10))
            limit = length if rng.random() < 0.5 else None
            run = WaitingRun(number, 1, rng.choice([1, 1, 2]), submitted_at=world.now, max_runtime_s=limit)
            world.submit(Job(replace(run, preemptible=limit is None), length, known=rng.random() < 0.7))
        world.step(10.0)
    job = world.jobs[1]
    assert job.started_first is not None
    assert job.promised is None or job.started_first <= job.promised + 10.0 + SETTINGS.stop_s


def burst_does_not_win(rng: Random) -> None:
    """Two teams of equal weight and usage: one submits very much more, first; both get as many devices."""
    sizes, wanted = rng.choice([(4,), (4, 4), (2, 2, 2)]), rng.randint(1, 6)
    world = World([node(i + 1, size) for i, size in enumerate(sizes)], [team(1), team(2)], SETTINGS)
    for number in range(1, 30):
        world.submit(Job(WaitingRun(number, 1, 1, submitted_at=0.0), 1e4))
    for number in range(100, 100 + wanted):
        world.submit(Job(WaitingRun(number, 2, 1, submitted_at=9.0), 1e4))
    world.step(0.0)
    mine = sum(run.team_id == 2 for run in world.running.values())
    assert mine >= min(wanted, sum(sizes) // 2)


def _quota(rng: Random) -> dict[int, Quota]:
    if rng.random() < 0.4:
        return {}
    return {1: Quota(rng.randint(0, 5), rng.choice([None, None, 2, 4]))}


LIVES = {
    each.__name__: each
    for each in (no_starvation, owners_get_their_own, no_ping_pong, reservation_kept_in_time, burst_does_not_win)
}

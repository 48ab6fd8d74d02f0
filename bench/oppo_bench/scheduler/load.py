"""A cluster under load for `oppo bench scheduler`: nodes of eight GPUs, ten teams with quotas, running and queued runs.

Rows are inserted in bulk; everything measured goes through the scheduler itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

GPUS_A_NODE, TEAMS = 8, 10
# Requested GPUs, and their frequency.
GANGS, OFTEN = (1, 2, 4, 8), (50, 25, 15, 10)
SPEC = {"name": "load", "steps": 100_000, "resources": {"kind": "cuda"}}


@dataclass(frozen=True, slots=True)
class Load:
    """Number of GPUs and of queued runs; with `single` every run asks for one GPU."""

    waiting: int
    gpus: int
    seed: int = 0
    single: bool = False

    @property
    def name(self) -> str:
        """As in the figures' names, for example `1000x200`."""
        return f"{self.waiting}x{self.gpus}"


def generator(seed: int) -> random.Random:
    """Random numbers of a load: repeatable."""
    return random.Random(seed)


def build(load: Load) -> None:
    """Empty the tables and write the cluster; a first cycle places what fits, the rest is queued."""
    from django.db import connection, transaction

    from oppo_platform.scheduling.cycle import run_cycle

    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE accounts_team, accounts_user, cluster_pool, cluster_node, scheduling_schedulerbeat CASCADE")
    with transaction.atomic():
        pool = _nodes(load)
        projects = _teams(load, pool)
        _runs(load, projects)
    run_cycle()
    begin_all(generator(load.seed))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")  # as the server does by itself within a minute


def _nodes(load: Load) -> Any:
    from oppo_contract.wire import WIRE_VERSION
    from oppo_platform import clock
    from oppo_platform.cluster.models import CatalogueItem, Device, Node, Pool

    now = clock.now()
    pool = Pool.objects.create(name="H100", created_at=now)
    seen = now + timedelta(days=1)  # no worker reports, and no node may become unreachable
    nodes = Node.objects.bulk_create(
        Node(
            name=f"gpu-{n:03}", hostname="host", cpus=64, memory_bytes=1 << 40, token_prefix=f"n{n}", token_digest="", pool=pool,
            queue=f"oppo.node.gpu-{n:03}", joined_at=now, last_seen_at=seen, catalogue_at=now,
            wire_version=WIRE_VERSION,
        )
        for n in range(-(-load.gpus // GPUS_A_NODE))
    )  # fmt: skip
    devices = [(node, index) for node in nodes for index in range(GPUS_A_NODE)][: load.gpus]
    facts = {"kind": "cuda", "model": "H100", "memory_bytes": 80 << 30}
    Device.objects.bulk_create(Device(node=node, index=index, **facts) for node, index in devices)
    CatalogueItem.objects.bulk_create(CatalogueItem(node=node, entry_id="letters", kind="prompts", bytes=1) for node in nodes)
    return pool


def _teams(load: Load, pool: Any) -> list[Any]:
    from oppo_platform import clock
    from oppo_platform.accounts.models import Team, User
    from oppo_platform.projects.models import Project
    from oppo_platform.scheduling.models import TeamQuota

    now = clock.now()
    User.objects.create_user("load", "load@example.org", "a password for nobody")
    teams = Team.objects.bulk_create(Team(name=f"team {n}", created_at=now) for n in range(TEAMS))
    share = load.gpus // TEAMS
    TeamQuota.objects.bulk_create(TeamQuota(team=team, pool=pool, nominal=share, borrow_cap=4 * share) for team in teams)
    return Project.objects.bulk_create(Project(team=team, name="load", created_at=now) for team in teams)


def requested_gpus(load: Load, chance: random.Random) -> list[int]:
    """GPUs of each run: the first cycle assigns all of the cluster's, and about `waiting` runs stay queued."""
    if load.single:
        return [1] * (load.waiting + load.gpus)
    mean = sum(size * weight for size, weight in zip(GANGS, OFTEN, strict=True)) / sum(OFTEN)
    return chance.choices(GANGS, OFTEN, k=load.waiting + round(load.gpus / mean))


def _runs(load: Load, projects: list[Any]) -> None:
    from oppo_platform import clock
    from oppo_platform.accounts.models import User
    from oppo_platform.runs.models import Run

    chance, now, user = generator(load.seed), clock.now(), User.objects.get()
    sizes = requested_gpus(load, chance)
    Run.objects.bulk_create(
        (
            Run(
                project=chance.choice(projects), user=user, name=f"run {n}", spec=SPEC, spec_version=1, preset="oppo",
                devices=size, needs={"kind": "cuda", "models": [], "prompts": ["letters"]}, priority=chance.randint(30, 70),
                created_at=now, queued_at=now + timedelta(milliseconds=n), total_steps=100_000, cursor=1,
                max_runtime_s=chance.choice((None, 3600.0, 36_000.0)),
            )
            for n, size in enumerate(sizes)
        ),
        batch_size=2000,
    )  # fmt: skip


def begin_all(chance: random.Random) -> None:
    """Let every placed run train, at a measured speed, so that the scheduler has estimates."""
    from oppo_contract.states import RunState
    from oppo_platform import clock
    from oppo_platform.runs.models import Attempt, AttemptState, Run

    now = clock.now()
    placed = list(Run.objects.filter(state=RunState.ALLOCATED))
    for run in placed:
        run.state, run.step, run.elapsed_s = RunState.RUNNING, chance.randint(100, 90_000), 3600.0
    Run.objects.bulk_update(placed, ["state", "step", "elapsed_s"], batch_size=1000)
    Attempt.objects.filter(state=AttemptState.ALLOCATED).update(
        state=AttemptState.RUNNING, claimed_at=now, seen_at=now, lease_expires_at=now + timedelta(days=1)
    )

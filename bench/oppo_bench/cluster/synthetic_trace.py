"""Synthetic traces: Poisson arrivals, log-normal durations, gangs, and estimates that are wrong or missing.

The mean arrival rate follows from the load: Σ devices · duration ÷ (GPUs · span of submissions). Given their number, arrivals of
a Poisson process are uniform in time, so the load is met exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from types import MappingProxyType

from oppo_bench.cluster.trace import Cluster, PoolOfNodes, QuotaInTrace, Submission, TeamInTrace, Trace

POOL = "gpus"
LONGEST_S = 3 * 24 * 3600.0
SHORTEST_S = 60.0
PRIORITIES = (40, 50, 50, 50, 60)
USERS_A_TEAM = 4
BURST_AT = 0.25  # of the span of submissions


@dataclass(frozen=True, slots=True)
class Shape:
    """Kind of a trace: frequency of each gang size, and number of runs that the first team submits at once."""

    gangs: Mapping[int, float]
    burst: int = 0


SMALL = {1: 0.46, 2: 0.16, 4: 0.14, 8: 0.14, 16: 0.06, 32: 0.03, 64: 0.01}
LARGE = {1: 0.30, 2: 0.10, 4: 0.10, 8: 0.20, 16: 0.15, 32: 0.10, 64: 0.05}
SHAPES: Mapping[str, Shape] = MappingProxyType({"steady": Shape(SMALL), "burst": Shape(SMALL, burst=200), "gangs": Shape(LARGE)})


@dataclass(frozen=True, slots=True)
class Recipe:
    """All parameters of a synthetic trace. Durations: log-normal, cut at a minute and at three days."""

    shape: str = "steady"
    seed: int = 0
    runs: int = 2000
    gpus: int = 256
    gpus_a_node: int = 8
    teams: int = 5
    load: float = 0.9
    median_s: float = 1800.0
    sigma: float = 1.5
    estimate_sigma: float = 0.5  # estimate ÷ duration is log-normal with this σ
    estimate_missing: float = 0.2  # share of the runs without an estimate
    bounded: float = 0.3  # share with an enforced max_runtime_s of 1.2 to 3 times their duration
    preemptible: float = 0.85  # share of preemptible runs


def synthesize(recipe: Recipe) -> Trace:
    """A trace, the same for the same recipe. Raises ValueError when the GPUs are not a whole number of nodes."""
    if recipe.gpus % recipe.gpus_a_node:
        raise ValueError(f"{recipe.gpus} GPUs make no whole number of nodes of {recipe.gpus_a_node}.")
    random, shape = Random(recipe.seed), SHAPES[recipe.shape]
    sizes = {size: weight for size, weight in shape.gangs.items() if size <= recipe.gpus}
    devices = random.choices(list(sizes), weights=list(sizes.values()), k=recipe.runs)
    durations = [_duration(random, recipe) for _ in range(recipe.runs)]
    span = sum(d * s for d, s in zip(devices, durations, strict=True)) / (recipe.gpus * recipe.load)
    names = [f"team-{number}" for number in range(1, recipe.teams + 1)]
    submissions = []
    for index, (count, duration) in enumerate(zip(devices, durations, strict=True)):
        bursts = index < min(shape.burst, recipe.runs)
        at = span * BURST_AT if bursts else random.uniform(0.0, span)
        team = names[0] if bursts else random.choices(names, cum_weights=_appetites(recipe.teams))[0]
        submissions.append(_submission(random, recipe, (round(at, 1), team, count, duration)))
    return Trace(_cluster(recipe, names), tuple(sorted(submissions, key=lambda s: s.at_s)))


def _duration(random: Random, recipe: Recipe) -> float:
    drawn = recipe.median_s * math.exp(random.gauss(0.0, recipe.sigma))
    return round(min(LONGEST_S, max(SHORTEST_S, drawn)), 1)


def _appetites(teams: int) -> list[float]:
    """Cumulated shares of the submissions: team k submits ∝ 1 ÷ √k, so that demand is unequal."""
    return list(accumulate(1.0 / math.sqrt(number) for number in range(1, teams + 1)))


def _submission(random: Random, recipe: Recipe, drawn: tuple[float, str, int, float]) -> Submission:
    at, team, devices, duration = drawn
    wrong = math.exp(random.gauss(0.0, recipe.estimate_sigma))
    missing, bounded, preemptible = random.random(), random.random(), random.random()
    return Submission(
        at_s=at,
        team=team,
        user=f"{team}-user-{random.randint(1, USERS_A_TEAM)}",
        priority=random.choice(PRIORITIES),
        devices=devices,
        nodes_max=math.ceil(devices / recipe.gpus_a_node),
        duration_s=duration,
        estimate_s=None if missing < recipe.estimate_missing else round(duration * wrong, 1),
        preemptible=preemptible < recipe.preemptible,
        max_runtime_s=round(duration * random.uniform(1.2, 3.0), 1) if bounded < recipe.bounded else None,
        kind="cuda",
    )


def _cluster(recipe: Recipe, names: list[str]) -> Cluster:
    """Equal weights; the GPUs are divided evenly into the teams' quotas, and borrowing is unlimited."""
    quota = QuotaInTrace(nominal=recipe.gpus // recipe.teams)
    return Cluster(
        trace=recipe.shape,
        pools=(PoolOfNodes(name=POOL, nodes=recipe.gpus // recipe.gpus_a_node, gpus=recipe.gpus_a_node),),
        teams=tuple(TeamInTrace(name=name, quotas={POOL: quota}) for name in names),
    )

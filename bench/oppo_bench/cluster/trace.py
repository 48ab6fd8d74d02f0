"""Trace files: JSON Lines with the cluster on the first line, then one submission per line, ordered by `at_s`.

Unknown fields and wrong types are refused with line and field. All instants are seconds since the trace's beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from oppo_platform.scheduling.policy import Device, Node, Pool, Quota, Team

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeastZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=80)]
MOST_DEVICES = 100_000
Span = tuple[float, float]  # from, to; seconds


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PoolOfNodes(_Line):
    """Several equal nodes of a pool."""

    name: Name
    nodes: int = Field(ge=1, le=MOST_DEVICES)
    gpus: int = Field(ge=1, le=1024)  # devices per node
    kind: Literal["cuda", "cpu"] = "cuda"
    model: str = ""


class QuotaInTrace(_Line):
    """A team's devices in a pool: its own, and how many it may borrow (null: unlimited)."""

    nominal: int = Field(default=0, ge=0)
    borrow_cap: int | None = Field(default=None, ge=0)


class TeamInTrace(_Line):
    """A team: its weight in fair sharing, and its quotas by pool name."""

    name: Name
    weight: Positive = 1.0
    quotas: dict[str, QuotaInTrace] = {}


class Cluster(_Line):
    """The first line: data that the submissions share."""

    trace: str = ""  # display name of the trace
    pools: tuple[PoolOfNodes, ...] = Field(min_length=1)
    teams: tuple[TeamInTrace, ...] = Field(min_length=1)


class Submission(_Line):
    """One run: submission time, request, and true duration."""

    at_s: AtLeastZero
    team: Name
    user: str = ""
    priority: int = Field(default=50, ge=1, le=99)
    devices: int = Field(ge=1)
    nodes_max: int = Field(default=1, ge=1)
    duration_s: Positive  # on its devices, without waits and restarts
    estimate_s: Positive | None = None  # the user's estimate
    preemptible: bool = True
    max_runtime_s: Positive | None = None  # enforced limit
    kind: Literal["any", "cuda", "cpu"] = "any"

    @property
    def work_s(self) -> float:
        """Seconds on its devices: its duration, or its limit if shorter."""
        return self.duration_s if self.max_runtime_s is None else min(self.duration_s, self.max_runtime_s)


class TraceError(ValueError):
    """An invalid trace; the message names the line and the field."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A cluster and its submissions, sorted by `at_s`. Pools and teams are numbered from 1 in their order."""

    cluster: Cluster
    submissions: tuple[Submission, ...]

    @property
    def name(self) -> str:
        """Display name."""
        return self.cluster.trace or "trace"

    @property
    def last_s(self) -> float:
        """Instant of the last submission."""
        return max((s.at_s for s in self.submissions), default=0.0)

    def pools(self) -> tuple[Pool, ...]:
        """Pools in the policy's types."""
        return tuple(Pool(number, pool.name) for number, pool in enumerate(self.cluster.pools, 1))

    def nodes(self) -> tuple[Node, ...]:
        """Nodes and their devices, numbered from 1."""
        nodes: list[Node] = []
        device_id = 0
        for pool_id, pool in enumerate(self.cluster.pools, 1):
            for number in range(1, pool.nodes + 1):
                ids = range(device_id + 1, device_id + pool.gpus + 1)
                device_id += pool.gpus
                devices = tuple(Device(each, pool.kind, pool.model) for each in ids)
                nodes.append(Node(len(nodes) + 1, f"{pool.name}-{number}", pool_id, devices))
        return tuple(nodes)

    def teams(self) -> tuple[Team, ...]:
        """Teams with weights and quotas."""
        pool_ids = {pool.name: number for number, pool in enumerate(self.cluster.pools, 1)}
        return tuple(
            Team(
                team_id=number,
                name=team.name,
                weight=team.weight,
                quotas={pool_ids[name]: Quota(quota.nominal, quota.borrow_cap) for name, quota in team.quotas.items()},
            )
            for number, team in enumerate(self.cluster.teams, 1)
        )

    def lines(self) -> Iterator[str]:
        """The trace as JSON Lines, without line ends."""
        yield self.cluster.model_dump_json()
        for submission in self.submissions:
            yield submission.model_dump_json()


def read_trace(lines: Iterable[str]) -> Trace:
    """Read a trace. Raises TraceError for the first invalid line."""
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise TraceError("The trace is empty: its first line must describe the cluster.")
    cluster = _parsed(Cluster, *numbered[0])
    _check_cluster(cluster, numbered[0][0])
    teams = {team.name for team in cluster.teams}
    submissions = []
    for number, line in numbered[1:]:
        submission = _parsed(Submission, number, line)
        if submission.team not in teams:
            raise TraceError(f"Line {number}, team: {submission.team!r} is none of the teams of the first line.")
        submissions.append(submission)
    return Trace(cluster, tuple(sorted(submissions, key=lambda s: s.at_s)))


Parsed = TypeVar("Parsed", bound=_Line)


def _parsed(model: type[Parsed], number: int, line: str) -> Parsed:
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise TraceError(f"Line {number}{', ' + field if field else ''}: {first['msg']}.") from None


def _check_cluster(cluster: Cluster, number: int) -> None:
    pools, teams = [pool.name for pool in cluster.pools], [team.name for team in cluster.teams]
    for field, names in (("pools", pools), ("teams", teams)):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise TraceError(f"Line {number}, {field}: {twice!r} is listed twice.")
    for index, team in enumerate(cluster.teams):
        unknown = next((name for name in team.quotas if name not in pools), None)
        if unknown is not None:
            raise TraceError(f"Line {number}, teams.{index}.quotas: there is no pool {unknown!r}.")
    if sum(pool.nodes * pool.gpus for pool in cluster.pools) > MOST_DEVICES:
        raise TraceError(f"Line {number}, pools: more than {MOST_DEVICES:,} devices.")


def overlap(one: Span, other: Span) -> float:
    """Seconds that two spans have in common."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))

"""Statistics of `bench/soak.py`: slopes with their standard errors, and what of them is not flat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

WARM_UP = 0.25  # share of the time in which caches and pools fill; no slope is taken from it
SURE_SE = 2.0  # a slope counts when it is this many standard errors above its bound
# Growth of one role per hour. In less than an hour, as much growth is allowed as in an hour.
BOUNDS = {
    "mib": 4.0,  # of memory: below 100 MiB a day, so a month between two restarts costs no process more than 3 GiB
    "descriptors": 4.0,  # of 1,024, the usual limit of a process: it lasts ten days
    "threads": 2.0,  # each has a stack of up to 8 MiB
    "connections": 1.0,  # of PostgreSQL's 100: it lasts three days, and a leak per request, run or page is far above it
}
# PostgreSQL keeps files open once it has used them, up to 1,000 per process (`max_files_per_process`): shown, not judged.
NOT_JUDGED = {("database", "descriptors")}
P95_RATIO = 1.25  # the last quarter's p95 ÷ the first's: the same data is asked for, so it should be 1
P95_NOISE_MS = 3.0  # a difference below it is the machine's scheduling, not the platform
FEWEST_CALLS = 40  # in a quarter; the p95 of fewer is decided by one or two calls
# Tables and indexes that grew ÷ what the platform counted for its runs, which is documented as right within a third; the rest is
# space of dead rows that PostgreSQL has not used again yet (docs/storage.md).
DATABASE_FACTOR = 1.5
LEAST_GROWTH_MIB = 4.0  # below it whole pages of 8 KiB in some forty indexes are a large part


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per hour and its standard error."""

    per_hour: float
    error: float


@dataclass(frozen=True, slots=True)
class Trend:
    """One quantity of one role: mean of its first and last quarter, and growth after the warm-up."""

    role: str
    quantity: str
    first: float
    last: float
    slope: Slope
    flat: bool


@dataclass(slots=True)
class History:
    """What was sampled: hours since the start, and per (role, quantity) one value each; NaN while a role had no process."""

    hours: list[float] = field(default_factory=list)
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, hour: float, sample: Mapping[tuple[str, str], float]) -> None:
        """Add a sample."""
        for key in sample.keys() - self.values.keys():
            self.values[key] = [math.nan] * len(self.hours)
        self.hours.append(hour)
        for key, values in self.values.items():
            values.append(sample.get(key, math.nan))

    def trends(self) -> list[Trend]:
        """The trend of every quantity with at least four values after the warm-up."""
        end = self.hours[-1]
        found = []
        for (role, quantity), values in self.values.items():
            points = [(hour, value) for hour, value in zip(self.hours, values, strict=True) if not math.isnan(value)]
            steady = [(hour, value) for hour, value in points if hour >= WARM_UP * end]
            if len(steady) < 4:
                continue
            slope = fit([hour for hour, _ in steady], [value for _, value in steady])
            allowed = BOUNDS[quantity] / min(1.0, steady[-1][0] - steady[0][0])
            first = [value for hour, value in points if hour <= end / 4] or [steady[0][1]]
            last = [value for hour, value in points if hour >= end * 3 / 4] or [steady[-1][1]]
            flat = (role, quantity) in NOT_JUDGED or slope.per_hour - SURE_SE * slope.error <= allowed
            found.append(Trend(role, quantity, fmean(first), fmean(last), slope, flat))
        return found


def fit(hours: Sequence[float], values: Sequence[float]) -> Slope:
    """Least-squares slope. Its standard error takes into account that neighbouring samples resemble each other (AR(1))."""
    n, middle, mean = len(hours), fmean(hours), fmean(values)
    spread = sum((hour - middle) ** 2 for hour in hours)
    per_hour = sum((hour - middle) * (value - mean) for hour, value in zip(hours, values, strict=True)) / spread
    rest = [value - mean - per_hour * (hour - middle) for hour, value in zip(hours, values, strict=True)]
    squares = sum(r * r for r in rest)
    if squares < 1e-12 * max(1.0, mean * mean):  # a line: rounding is all that is left
        return Slope(per_hour, 0.0)
    alike = sum(a * b for a, b in pairwise(rest)) / squares
    alike = min(0.95, max(0.0, alike))
    return Slope(per_hour, math.sqrt(squares / (n - 2) / spread * (1 + alike) / (1 - alike)))


def p95(values: Sequence[float]) -> float:
    """95th percentile, as `Result.tail`."""
    ordered = sorted(values)
    return ordered[max(0, round(0.95 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class CallTrend:
    """An API call: p95 in ms of the first and the last quarter, and the fewer calls of the two."""

    name: str
    first_ms: float
    last_ms: float
    n: int

    @property
    def ratio(self) -> float:
        """Last ÷ first."""
        return self.last_ms / self.first_ms

    @property
    def flat(self) -> bool:
        """Whether it is not slower at the end; with few calls nothing is claimed."""
        return self.n < FEWEST_CALLS or self.ratio <= P95_RATIO or self.last_ms - self.first_ms <= P95_NOISE_MS


def call_trend(name: str, taken: Sequence[tuple[float, float]], end: float) -> CallTrend:
    """From (hour, ms) of every call."""
    first = [ms for hour, ms in taken if hour <= end / 4] or [taken[0][1]]
    last = [ms for hour, ms in taken if hour >= end * 3 / 4] or [taken[-1][1]]
    return CallTrend(name, p95(first), p95(last), min(len(first), len(last)))


@dataclass(frozen=True, slots=True)
class DatabaseSize:
    """MiB by which the runs' tables grew, and by which the platform's own figure grew (`storage.usage`)."""

    grown: float
    counted: float

    @property
    def factor(self) -> float:
        """Grown ÷ counted."""
        return self.grown / self.counted if self.counted else math.nan

    @property
    def as_counted(self) -> bool:
        """Whether they agree, or too little was stored to say."""
        return self.grown < LEAST_GROWTH_MIB or 1 / DATABASE_FACTOR <= self.factor <= DATABASE_FACTOR


def show(trends: Sequence[Trend], calls: Sequence[CallTrend], size: DatabaseSize) -> None:
    """Print the roles' trends, the API calls, and the growth of the database; `*` marks what is not flat."""
    cells = {(trend.role, trend.quantity): trend for trend in trends}
    for left, right in (("mib", "descriptors"), ("threads", "connections")):
        print(f"\n{'mean of first and last quarter':27}{left + ': first':>16}{'last':>8}{'per hour ± SE':>17}", end="")
        print(f"{right + ': first':>20}{'last':>8}{'per hour ± SE':>17}")
        for role in sorted({trend.role for trend in trends}):
            print(f"{role:27}{_cell(cells.get((role, left)), 16)}{_cell(cells.get((role, right)), 20)}".rstrip())
    print(f"\n{'API call, p95 in ms':27}{'first quarter':>16}{'last':>8}{'ratio':>8}{'calls':>7}")
    for call in calls:
        print(f"{call.name:27}{call.first_ms:16.1f}{call.last_ms:8.1f}{call.ratio:8.2f}{call.n:7}{'' if call.flat else ' *'}")
    mark = "" if size.as_counted else " *"
    print(f"\nThe runs' tables grew by {size.grown:.1f} MiB; the platform counted {size.counted:.1f} ({size.factor:.2f} ×){mark}")


def _cell(trend: Trend | None, width: int) -> str:
    if trend is None:
        return " " * (width + 26)
    slope = f"{trend.slope.per_hour:.1f} ± {trend.slope.error:.1f}"
    return f"{trend.first:{width}.1f}{trend.last:8.1f}{slope:>17}{' ' if trend.flat else '*'}"


def complaints(trends: Sequence[Trend], calls: Sequence[CallTrend], size: DatabaseSize, faults: Sequence[str]) -> list[str]:
    """What is not flat, a line each; nothing if the platform stayed the same."""
    grown = [
        f"{trend.role}: {trend.quantity} grow by {trend.slope.per_hour:.2f} ± {trend.slope.error:.2f} an hour,"
        f" {trend.first:.1f} → {trend.last:.1f}"
        for trend in trends
        if not trend.flat
    ]
    slower = [
        f"{call.name}: p95 {call.first_ms:.1f} → {call.last_ms:.1f} ms ({call.ratio:.2f} ×)" for call in calls if not call.flat
    ]
    wrong = f"the runs' tables grew by {size.grown:.1f} MiB, the platform counted {size.counted:.1f}"
    return [*grown, *slower, *([] if size.as_counted else [wrong]), *faults]

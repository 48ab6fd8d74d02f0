"""The platform's clock. Leases use the database's clock, which all processes share; tests set their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from django.db import connection
from django.db.models import DateTimeField, Expression, FloatField, Func, Value


class Clock(Protocol):
    """Source of time."""

    def now(self) -> datetime:
        """The current time, with its time zone (UTC)."""
        ...

    def expression(self) -> Expression:
        """The current time in a query."""
        ...


class DatabaseClock:
    """PostgreSQL's wall clock, also inside a transaction (where `now()` is constant)."""

    def now(self) -> datetime:
        """The current time on the database's clock."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT clock_timestamp()")
            return cursor.fetchone()[0].astimezone(UTC)

    def expression(self) -> Expression:
        """The time of the database's clock when the query runs."""
        return Func(function="clock_timestamp", output_field=DateTimeField())


class ManualClock:
    """A clock that moves only when advanced, for tests and simulations."""

    def __init__(self, start: datetime) -> None:
        self.current = start

    def now(self) -> datetime:
        """The time it was set to."""
        return self.current

    def expression(self) -> Expression:
        """The time it was set to, as a constant."""
        return Value(self.current, output_field=DateTimeField())

    def advance(self, seconds: float) -> None:
        """Move on."""
        self.current += timedelta(seconds=seconds)


_clock: Clock = DatabaseClock()


def now() -> datetime:
    """The current time. Every lease, deadline and time stamp of the platform uses it."""
    return _clock.now()


class Now(Expression):
    """The clock's time when a query is compiled or runs, so that a queryset can be cached."""

    output_field = DateTimeField()

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        """The expression of the clock in use."""
        return compiler.compile(_clock.expression())


def now_in_query() -> Expression:
    """The current time as an expression of a query, which saves a query of its own."""
    return Now()


def iso(time: datetime) -> str:
    """The time in JSON: ISO 8601, with Z for UTC."""
    return time.isoformat().replace("+00:00", "Z")


@contextmanager
def use_clock(clock: Clock) -> Iterator[None]:
    """Within the block the whole process uses `clock`."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


class Posix(Func):
    """A timestamp of the database as POSIX seconds; for thousands of rows, because conversion to datetime takes 10 µs."""

    template = "EXTRACT(EPOCH FROM %(expressions)s)::float8"
    arity = 1
    output_field = FloatField()

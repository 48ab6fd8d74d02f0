"""Columns of the runs table: the user's choice, a run's value in each, and its difference from the baseline's.

A choice is a query parameter, `state,reward,actor/entropy,ppo.batch_size`: columns of the table, metric keys and setting paths,
in display order. Pure: values come from a run's summary and spec, never from a series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oppo_platform.runs.filtering import BARE_METRICS, METRIC, SETTING, FilterError, did_you_mean

MOST_COLUMNS, LONGEST = 30, 2000
Kind = Literal["state", "progress", "curve", "status", "moment", "word", "whole", "figure", "share", "seconds", "setting"]
COMPARED = frozenset({"whole", "figure", "share", "seconds", "setting"})


@dataclass(frozen=True, slots=True)
class Column:
    """`key` is used in URLs; `sort` is its name in `filtering.sort_expression`, `first` is `-` if it sorts descending first."""

    key: str
    title: str
    kind: Kind
    sort: str = ""
    first: str = ""
    metric: str = ""  # its key in `latest`
    says: str = ""

    @property
    def numeric(self) -> bool:
        """Whether it is right-aligned."""
        return self.kind in ("whole", "figure", "share", "seconds", "moment")


COLUMNS: dict[str, Column] = {
    column.key: column
    for column in (
        Column("state", "State", "state", "state", says="run state"),
        Column("step", "Step", "progress", "step", "-", says="steps done / total"),
        Column("reward", "Reward", "figure", "reward", "-", "critic/score/mean", "latest mean reward"),
        Column("curve", "Curve", "curve", says="reward curve"),
        Column("kl", "KL", "figure", "kl", "", "objective/kl", "latest KL to the reference, nats"),
        Column("bubble", "Bubble", "share", "bubble", says="idle share of device time, last step"),
        Column("time", "Time", "status", "elapsed", "-", says="time left, training time, or error"),
        Column("preset", "Preset", "word", says="preset"),
        Column("project", "Project", "word", "project", says="project"),
        Column("user", "Owner", "word", "user", says="submitting user"),
        Column("submitted", "Submitted", "moment", "submitted", "-", says="submission time"),
        Column("id", "Number", "whole", "id", "-", says="run number"),
        Column("team", "Team", "word", says="team"),
        Column("devices", "Devices", "whole", "devices", "-", says="requested devices"),
        Column("priority", "Priority", "whole", "priority", "-", says="1 to 99"),
        Column("elapsed", "Trained", "seconds", "elapsed", "-", says="training time"),
    )
}
DEFAULT_COLUMNS = ("state", "step", "reward", "curve", "kl", "bubble", "time", "preset", "project", "user", "submitted")
ATTRIBUTES = {"id": "id", "devices": "devices", "priority": "priority", "elapsed": "elapsed_s", "bubble": "bubble",
              "preset": "preset", "project": "project", "team": "team", "user": "user", "submitted": "created_at"}  # fmt: skip


def column(key: str) -> Column:
    """The column of this key. Raises FilterError with the nearest name when there is none."""
    if key in COLUMNS:
        return COLUMNS[key]
    if key in BARE_METRICS or ("/" in key and METRIC.fullmatch(key)):
        return Column(key, key, "figure", key, "-", key)
    if SETTING.match(key):
        return Column(key, key, "setting", key)
    hint = did_you_mean(key, [*COLUMNS, *BARE_METRICS])
    raise FilterError(f"There is no column “{key[:60]}”{hint} Columns: {', '.join(COLUMNS)}, metrics and settings.", key)


def parse_columns(text: str) -> list[Column]:
    """Columns of a choice, each once; the defaults if it is empty. Raises FilterError."""
    if len(text) > LONGEST or "\0" in text:
        raise FilterError(f"A column selection has at most {LONGEST} characters.")
    keys = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip())) or list(DEFAULT_COLUMNS)
    if len(keys) > MOST_COLUMNS:
        raise FilterError(f"A table has at most {MOST_COLUMNS} columns.")
    return [column(key) for key in keys]


def format_columns(columns: Sequence[Column]) -> str:
    """The choice as a query parameter; empty for the default columns."""
    keys = [column.key for column in columns]
    return "" if keys == list(DEFAULT_COLUMNS) else ",".join(keys)


def reads_settings(columns: Sequence[Column]) -> bool:
    """Whether the runs' specs are needed."""
    return any(column.kind == "setting" for column in columns)


def value(column: Column, run: Mapping[str, Any], spec: Mapping[str, Any] | None = None) -> Any:
    """The value of a column in a run's summary or spec: a number, a text, or None."""
    if column.kind == "setting":
        return _setting(spec or {}, column.key.split("."))
    if column.metric:
        return run["latest"].get(column.metric)
    if column.kind == "seconds" and not run["step"]:
        return None  # it has not trained yet
    return run[ATTRIBUTES[column.key]] if column.key in ATTRIBUTES else None


def _setting(spec: Any, path: Sequence[str]) -> Any:
    for name in path:
        if not isinstance(spec, Mapping) or name not in spec:
            return None
        spec = spec[name]
    if isinstance(spec, Mapping):
        return "…" if spec else None
    return ", ".join(map(str, spec)) if isinstance(spec, list) else spec


def difference(own: Any, reference: Any) -> float | None:
    """Difference of a number from the baseline's; None unless both are finite numbers."""
    return own - reference if _finite(own) and _finite(reference) else None


def _finite(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)

"""Completion data of the run filter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db.models import F, Func, TextField

from oppo_contract.states import RunState
from oppo_platform.accounts.models import User
from oppo_platform.projects.access import visible_projects
from oppo_platform.runs.access import visible_runs
from oppo_platform.runs.columns import COLUMNS
from oppo_platform.runs.filtering import ADDED_FIELDS, ARCHIVED, NUMBERS, SETTING, STATE_GROUPS, text_fields
from oppo_platform.runs.models import Run

MOST_VALUES = 200
NEWEST = 20  # runs whose metrics are suggested


def words(user: User) -> dict[str, Any]:
    """Terms for filters and columns of the runs that the user may see.

    `{fields: [{name, kind, says}], values: {field: [value]}, metrics: [key], settings: [path], columns: [{name, title,
    says}]}`
    """
    runs, projects = visible_runs(user), visible_projects(user)
    fields = [{"name": name, "kind": "text", "says": says} for name, says in text_fields().items()]
    fields += [{"name": name, "kind": "number", "says": number.says} for name, number in NUMBERS.items()]
    tags = runs.annotate(tag=Func(F("tags"), function="unnest", output_field=TextField())).values_list("tag", flat=True)
    owners = User.objects.filter(runs__in=runs).order_by("username").values_list("username", flat=True)
    newest = Run.objects.filter(pk__in=runs.order_by("-id").values("pk")[:NEWEST])
    keys = newest.annotate(key=Func(F("latest"), function="jsonb_object_keys", output_field=TextField()))
    return {
        "fields": fields,
        "values": {
            "state": [*STATE_GROUPS, *RunState],
            **{name: list(field.values) for name, field in ADDED_FIELDS.items()},
            "archived": [*ARCHIVED],
            "user": list(owners.distinct()[:MOST_VALUES]),
            "project": sorted(set(projects.values_list("name", flat=True)))[:MOST_VALUES],
            "team": sorted(set(projects.values_list("team__name", flat=True)))[:MOST_VALUES],
            "preset": sorted(set(runs.order_by().values_list("preset", flat=True).distinct()))[:MOST_VALUES],
            "tag": sorted(set(tags.order_by().distinct()))[:MOST_VALUES],
        },
        "metrics": sorted(set(keys.values_list("key", flat=True))),
        "settings": sorted({path for spec in newest.values_list("spec", flat=True) for path in _paths(spec)}),
        "columns": [{"name": column.key, "title": column.title, "says": column.says} for column in COLUMNS.values()],
    }


def _paths(spec: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of settings for filters and columns."""
    for key, value in spec.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{path}.")
        elif SETTING.match(path):
            yield path

"""Values of settings that older versions knew: what to say to a spec that still has one, and how a stored spec is read."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Retired:
    """`message`: why the value is gone; `allowed`: what to choose; `read_as`: the value that replaces it in a stored spec."""

    message: str
    allowed: str
    read_as: Any


# By the setting's path and its retired value.
RETIRED: dict[tuple[str, Any], Retired] = {
    ("ppo.on_nonfinite", "rollback"): Retired(
        "is gone: a run no longer returns to a checkpoint by itself",
        "skip, which leaves out the step that is not finite, or raise, which ends the run so that it can be resumed",
        read_as="skip",
    ),
}


def retired(path: str, value: object) -> Retired | None:
    """What is known of a value that a setting no longer takes."""
    return RETIRED.get((path, value)) if isinstance(value, str) else None


def without_retired(data: Any) -> Any:
    """A copy of a stored spec as plain data, each retired value replaced by the one that it is read as."""
    data = copy.deepcopy(data)
    for (path, value), entry in RETIRED.items():
        *above, name = path.split(".")
        section = data
        for part in above:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and section.get(name) == value:
            section[name] = entry.read_as
    return data

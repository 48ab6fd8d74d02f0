"""Settings and values of earlier versions. A new spec that uses one is refused with a message; a stored spec is still read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RetiredSetting:
    """A setting, or some values of it, that this version no longer has.

    Attributes:
        message, allowed: what a new spec is told, and what to choose instead.
        applies: which values are refused. Any other value of a removed setting had no effect and is ignored.
        read_as: the value that replaces a retired one in a stored spec; None where the whole setting is removed.
    """

    message: str
    applies: Callable[[Any], bool]
    allowed: str | None = None
    read_as: Any = None

    @property
    def is_removed(self) -> bool:
        """Whether the whole setting is gone, not only a value of it."""
        return self.read_as is None


def _drafts_rows(drafter: Any) -> bool:
    return not isinstance(drafter, dict) or drafter.get("max_rows", 0) != 0


# By dotted path.
RETIRED = {
    "overlap.drafter": RetiredSetting(
        "was removed: speculative decoding of the tail never ran where answers are deferred, and kept a GPU from using CUDA"
        " graphs. It changed no result: delete the section",
        applies=_drafts_rows,
    ),
    "ppo.on_nonfinite": RetiredSetting(
        "rollback was removed: a run no longer returns to a checkpoint by itself",
        applies=lambda value: bool(value == "rollback"),
        allowed="skip, which leaves out the step that is not finite, or raise, which ends the run so that it can be resumed",
        read_as="skip",
    ),
}


def find_retired(path: str, value: object) -> RetiredSetting | None:
    """The entry for a setting if `value` is one that it no longer takes."""
    entry = RETIRED.get(path)
    return entry if entry is not None and entry.applies(value) else None


def drop_unused_settings(data: Any) -> Any:
    """A copy of a spec's plain data without removed settings that had no effect."""
    return _changed(data, lambda entry, value: entry.is_removed and not entry.applies(value))


def replace_retired_settings(data: Any) -> Any:
    """A copy of a stored spec's plain data: removed settings are left out, retired values are replaced."""
    return _changed(data, lambda entry, value: entry.is_removed or entry.applies(value))


def _changed(data: Any, chosen: Callable[[RetiredSetting, Any], bool]) -> Any:
    for path, entry in RETIRED.items():
        *sections, key = path.split(".")
        section = data
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and key in section and chosen(entry, section[key]):
            data = _replaced(data, [*sections, key], entry)
    return data


def _replaced(data: dict[str, Any], path: list[str], entry: RetiredSetting) -> dict[str, Any]:
    """A copy of `data` without the value at `path`, or with the value that it is read as."""
    first, *rest = path
    if rest:
        return data | {first: _replaced(data[first], rest, entry)}
    if entry.is_removed:
        return {name: value for name, value in data.items() if name != first}
    return data | {first: entry.read_as}

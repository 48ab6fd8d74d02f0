"""Removed settings and values of earlier versions: rejected in a new spec, migrated in a stored spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RetiredSetting:
    """A removed setting, or removed values of a setting.

    Attributes:
        message, allowed: error message for a new spec, and the values to use instead.
        applies: whether a value is rejected. Other values of a removed setting had no effect and are ignored.
        read_as: replacement of a removed value in a stored spec; None if the whole setting is removed.
    """

    message: str
    applies: Callable[[Any], bool]
    allowed: str | None = None
    read_as: Any = None

    @property
    def is_removed(self) -> bool:
        """Whether the whole setting is removed, not only some values."""
        return self.read_as is None


def _drafter_was_on(drafter: Any) -> bool:
    return not isinstance(drafter, dict) or drafter.get("max_rows", 0) != 0


# By dotted path.
RETIRED = {
    "overlap.drafter": RetiredSetting(
        "was removed: speculative decoding of the tail never ran where responses are deferred, and prevented CUDA"
        " graphs. It changed no result: delete the section",
        applies=_drafter_was_on,
    ),
    # `engine` was the default, so every earlier spec has it, also without vLLM.
    "rollout.vllm_process": RetiredSetting(
        "was removed: vLLM always decodes in a separate process. Delete the setting",
        applies=lambda value: value not in ("engine", "own"),
    ),
    "ppo.on_nonfinite": RetiredSetting(
        "rollback was removed: a run no longer returns to a checkpoint by itself",
        applies=lambda value: bool(value == "rollback"),
        allowed="skip, which leaves out the step that is not finite, or raise, which ends the run so that it can be resumed",
        read_as="skip",
    ),
    "training.zero_stage": RetiredSetting(
        "stage 3 was removed: each rank had the whole weights beside its shards, so it saved nothing over stage 2",
        applies=lambda value: bool(value == 3),
        allowed="1 or 2; or training.backend fsdp2, which shards the weights",
        read_as=2,
    ),
}


def find_retired(path: str, value: object) -> RetiredSetting | None:
    """The entry for a setting if `value` is rejected; else None."""
    entry = RETIRED.get(path)
    return entry if entry is not None and entry.applies(value) else None


def drop_unused_settings(data: Any) -> Any:
    """Spec data without removed settings that had no effect."""
    return _migrate(data, lambda entry, value: entry.is_removed and not entry.applies(value))


def replace_retired_settings(data: Any) -> Any:
    """Stored spec data without removed settings, and with removed values replaced."""
    return _migrate(data, lambda entry, value: entry.is_removed or entry.applies(value))


def _migrate(data: Any, selects: Callable[[RetiredSetting, Any], bool]) -> Any:
    for path, entry in RETIRED.items():
        *sections, key = path.split(".")
        section = data
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and key in section and selects(entry, section[key]):
            data = _replace(data, [*sections, key], entry)
    return data


def _replace(data: dict[str, Any], path: list[str], entry: RetiredSetting) -> dict[str, Any]:
    first, *rest = path
    if rest:
        return data | {first: _replace(data[first], rest, entry)}
    if entry.is_removed:
        return {name: value for name, value in data.items() if name != first}
    return data | {first: entry.read_as}

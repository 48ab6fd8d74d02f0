"""Rules by name: entry points of the group `oppo.rules`. A name in a spec never leads to an import of what it spells."""

from __future__ import annotations

import importlib
import site
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from oppo_core.rewards.errors import RewardError

GROUP = "oppo.rules"


def registered_rules() -> list[str]:
    """Names of all rules that installed packages register."""
    return sorted(entry_points(group=GROUP).names)


def find_rule(name: str) -> Callable[..., Any]:
    """The function that is registered under `name`.

    Raises:
        RewardError: nobody registers that name, two packages do, or it cannot be imported.
    """
    found = {point.value: point for point in entry_points(group=GROUP, name=name)}
    if not found:
        raise RewardError(
            f"there is no rule {name}; registered are {', '.join(registered_rules()) or 'none'}. A rule is a function that an"
            f" installed package names as an entry point of the group {GROUP} (docs/rewards.md)"
        )
    if len(found) > 1:
        raise RewardError(f"the rule {name} is registered more than once: {', '.join(sorted(found))}; uninstall one")
    return _loaded(name, *found.values())


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except ModuleNotFoundError:
        # Installed for editing (`pip install -e`) since this interpreter began: a .pth file, not read yet, names its folder.
        for folder in site.getsitepackages():
            site.addsitedir(folder)
        importlib.invalidate_caches()
        return point.load()


def _loaded(name: str, point: EntryPoint) -> Callable[..., Any]:
    try:
        rule = _load(point)
    except Exception as error:
        raise RewardError(f"the rule {name} ({point.value}) cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(rule):
        raise RewardError(f"the rule {name} ({point.value}) is a {type(rule).__name__}, not a function")
    return rule  # type: ignore[no-any-return]

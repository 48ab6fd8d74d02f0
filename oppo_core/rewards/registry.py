"""Rules by name: entry points of the group `oppo.rules`. A name in a spec is never imported itself."""

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
    """The function registered under `name`.

    Raises:
        RewardError: the name is not registered, registered twice, or cannot be imported.
    """
    matches = {point.value: point for point in entry_points(group=GROUP, name=name)}
    if not matches:
        raise RewardError(
            f"there is no rule {name}; registered are {', '.join(registered_rules()) or 'none'}. A rule is a function that an"
            f" installed package names as an entry point of the group {GROUP} (docs/rewards.md)"
        )
    if len(matches) > 1:
        raise RewardError(f"the rule {name} is registered more than once: {', '.join(sorted(matches))}; uninstall one")
    (point,) = matches.values()
    try:
        rule = _load(point)
    except Exception as error:
        raise RewardError(f"the rule {name} ({point.value}) cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(rule):
        raise RewardError(f"the rule {name} ({point.value}) is a {type(rule).__name__}, not a function")
    return rule  # type: ignore[no-any-return]


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except ModuleNotFoundError:
        # An editable install (`pip install -e`) after this interpreter started: its .pth file was not read.
        for folder in site.getsitepackages():
            site.addsitedir(folder)
        importlib.invalidate_caches()
        return point.load()

"""A checkpoint of a run, as far as both clients know it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from oppo_client.html import escaped


class CheckpointFacts:
    """A registered checkpoint.

    Attributes:
        told: everything that the platform tells of it.
    """

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.told = dict(told)

    @property
    def id(self) -> int:
        """Its number on the platform."""
        return int(self.told["id"])

    @property
    def step(self) -> int:
        """PPO steps that are done in it."""
        return int(self.told["step"])

    @property
    def name(self) -> str:
        """Its folder's name; it says so when a step is half done in it."""
        return str(self.told["name"])

    @property
    def bytes(self) -> int:
        """How large its files are together."""
        return int(self.told["bytes"])

    @property
    def files(self) -> str:
        """`here`: they can be downloaded; `deleted`; `elsewhere`: the platform cannot read them."""
        return str(self.told["files"])

    @property
    def registered_at(self) -> datetime:
        """When the platform heard of it."""
        return datetime.fromisoformat(self.told["registered_at"])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} step={self.step} {self.bytes:,} bytes, files {self.files}>"

    def _repr_html_(self) -> str:
        return f"<code>{escaped(self.name)}</code> <small>step {self.step}, {self.bytes:,} bytes, {escaped(self.files)}</small>"

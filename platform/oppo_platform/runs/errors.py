"""What a worker is told when it asks for something that has been decided elsewhere."""

from __future__ import annotations

from typing import Literal

Why = Literal["stale_epoch", "already_claimed", "not_your_node", "ended", "lease_lost", "unknown_checkpoint"]


class AttemptRefused(Exception):
    """Decided elsewhere; final for this call."""

    def __init__(self, reason: Why, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)

"""Errors of the workers' API."""

from __future__ import annotations

from typing import Literal

Why = Literal["stale_epoch", "already_claimed", "not_your_node", "ended", "lease_lost", "unknown_checkpoint"]


class AttemptRefused(Exception):
    """The request conflicts with the attempt's state; final for this call."""

    def __init__(self, reason: Why, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)

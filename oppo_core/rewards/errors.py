"""Errors of rewards."""


class RewardError(ValueError):
    """A reward is not reachable, failed, or returned no score; the message names it and a remedy."""

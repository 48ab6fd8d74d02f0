"""What can be wrong with a reward."""


class RewardError(ValueError):
    """A reward that cannot be asked, failed, or answered with what is no score; the message says which, and the way on."""

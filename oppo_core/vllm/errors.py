"""What goes wrong with vLLM."""


class VllmError(Exception):
    """vLLM did something else than it was asked for, or nothing at all; the message says what."""

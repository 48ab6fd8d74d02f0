"""How OpenMP's threads wait. Set before torch is imported, so this module imports nothing heavy."""

from __future__ import annotations

import os

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")


def wait_as_the_engine_does() -> None:
    """The engine's own setting (`python -m oppo_core`): spin briefly, then sleep; the user's settings take precedence."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def thread_settings() -> dict[str, str]:
    """Variables that are set, for the benchmark's record."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}

"""`python -m oppo_core`: trains one run without the platform (docs/interfaces.md)."""

import os

# Limits OpenMP's busy waiting: on a busy machine unlimited spinning takes the core from the thread that is waited for; without
# spinning, two threads are slower than one (docs/measurements/2026-11-27.md). OpenMP reads it when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from oppo_core.cli import main


def preload() -> None:
    """Import the engine's modules in a fork server (oppo_contract.prefork), without starting threads or initializing CUDA."""
    import torch
    import torch._dynamo  # slow; torch optimizers import it on creation

    import oppo_core.engine.build
    import oppo_core.engine.preflight
    import oppo_core.train  # noqa: F401 - for the forks

    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert not initialized, "a CUDA context does not survive a fork"


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m oppo_core`: one run, without the platform. The command line is fixed in docs/interfaces.md."""

import os

# Threads of one process that wait for each other spin a little, then sleep. Without a limit a spinning thread keeps the core
# from the one it waits for as soon as anything else runs; without spinning two threads are slower than one
# (docs/performance.md). Read by OpenMP when torch is loaded, so it stands before every import; what the user set is kept.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from oppo_core.cli import main


def preload() -> None:
    """For a fork server (oppo_contract.prefork): import what an engine needs. Starts no thread and does not touch CUDA."""
    import torch
    import torch._dynamo  # every optimizer of torch imports it when it is made, which takes longer than torch itself

    import oppo_core.engine.build
    import oppo_core.engine.preflight
    import oppo_core.train  # noqa: F401 - for the forks

    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert not begun, "a CUDA context does not survive a fork"


if __name__ == "__main__":
    raise SystemExit(main())

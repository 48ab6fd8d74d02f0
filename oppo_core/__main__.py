"""`python -m oppo_core`: one run, without the platform. The command line is fixed in docs/interfaces.md."""

import os
import sys

# Threads of one process that wait for each other spin a little, then sleep. Without a limit a spinning thread keeps the core
# from the one it waits for as soon as anything else runs; without spinning two threads are slower than one
# (docs/performance.md). Read by OpenMP when torch is loaded, so it stands before every import; what the user set is kept.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from oppo_core.cli import main

if __name__ == "__main__":
    if sys.argv[1:2] == ["--standby"]:
        from oppo_core.standby import wait_for_an_attempt

        raise SystemExit(main(wait_for_an_attempt(int(sys.argv[2]))))
    raise SystemExit(main())

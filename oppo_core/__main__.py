"""`python -m oppo_core`: one run, without the platform. The command line is fixed in docs/interfaces.md."""

import os

# Threads of one process that wait for each other must not spin: with anything else running on the machine, a spinning
# thread keeps the core from the one it waits for (measured on two cores: a training pass 10 times slower). Read by
# OpenMP when torch is loaded, so it stands before every import; a value that the user set is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from oppo_core.command import main

if __name__ == "__main__":
    raise SystemExit(main())

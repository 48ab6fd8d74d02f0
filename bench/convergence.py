"""Does OPPO learn as much per step as sequential PPO? `python bench/convergence.py --work DIR [--json F] [--plot F]`"""

import sys

from oppo_bench.studies.convergence import main

if __name__ == "__main__":
    sys.exit(main())

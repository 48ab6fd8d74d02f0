"""The cost of a tracker: `python bench/trackers_cost.py [--mlflow URI] [--wandb] [--json FILE] [--steps N]`"""

import sys

from oppo_bench.studies.trackers_cost import main

if __name__ == "__main__":
    sys.exit(main())

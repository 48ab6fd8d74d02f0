"""How far is a replay from the run that it predicts? `python bench/predictions.py [--repetitions N] [--steps N] [--json FILE]`"""

import sys

from oppo_bench.studies.predictions import main

if __name__ == "__main__":
    sys.exit(main())

"""One rank beside two on the same cores: `python bench/ranks.py [--repetitions N] [--steps N] [--json FILE]`"""

import sys

from oppo_bench.studies.ranks import main

if __name__ == "__main__":
    sys.exit(main())

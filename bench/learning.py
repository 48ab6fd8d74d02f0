"""Does PPO learn, on every seed, sequential and OPPO alike? `python bench/learning.py --work DIR [--json FILE] [--quick]`"""

import sys

from oppo_bench.studies.learning import main

if __name__ == "__main__":
    sys.exit(main())

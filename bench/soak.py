"""Does the platform stay the same for hours? `python bench/soak.py --hours 2 [--json FILE]`, or `--minutes 6` to try it."""

import sys

from oppo_bench.soak.command import main

if __name__ == "__main__":
    sys.exit(main())

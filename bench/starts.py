"""How long do starts take? `python bench/starts.py [--repetitions N] [--demo] [--json FILE]`"""

import sys

from oppo_bench.studies.starts import main

if __name__ == "__main__":
    sys.exit(main())

"""Does anything get lost, whatever fails? `python bench/chaos.py --seed N --minutes M [--json FILE]`"""

import sys

from oppo_bench.chaos.command import main

if __name__ == "__main__":
    sys.exit(main())

"""What does the timeline cost? `python bench/tracing_cost.py [--hidden N] [--json FILE] [--steps N]`"""

import sys

from oppo_bench.studies.tracing_cost import main

if __name__ == "__main__":
    sys.exit(main())

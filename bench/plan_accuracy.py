"""How far is a run from its plan? `python bench/plan_accuracy.py [--json FILE] [--quick]`"""

import sys

from oppo_bench.studies.plan_accuracy import main

if __name__ == "__main__":
    sys.exit(main())

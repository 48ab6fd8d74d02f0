"""How far is the estimate from the resident memory of a run on a CPU? `python bench/resident_memory.py MODEL [--json FILE]`"""

import sys

from oppo_bench.studies.resident_memory import main

if __name__ == "__main__":
    sys.exit(main())

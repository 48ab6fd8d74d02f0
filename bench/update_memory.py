"""What do the levers on an update's memory cost, and what do they save? `python bench/update_memory.py [--json FILE]`"""

import sys

from oppo_bench.studies.update_memory import main

if __name__ == "__main__":
    sys.exit(main())

"""Cost and saving of the options for an update's memory: `python bench/update_memory.py [--json FILE]`"""

import sys

from oppo_bench.studies.update_memory import main

if __name__ == "__main__":
    sys.exit(main())

"""What does the reference of a run with adapters take? `python bench/shared_reference.py [--json FILE]`"""

import sys

from oppo_bench.studies.shared_reference import main

if __name__ == "__main__":
    sys.exit(main())

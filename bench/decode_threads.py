"""Does a second thread pay when one process decodes? `python bench/decode_threads.py [--json FILE]`"""

import sys

from oppo_bench.studies.decode_threads import main

if __name__ == "__main__":
    sys.exit(main())

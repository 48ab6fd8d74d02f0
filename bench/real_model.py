"""Does PPO improve a published language model? `python bench/real_model.py --task sentiment [--seeds 3] [--json FILE]`"""

import sys

from oppo_bench.studies.real_model import main

if __name__ == "__main__":
    sys.exit(main())

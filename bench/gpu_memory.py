"""How far is the estimate from a GPU's memory? `python bench/gpu_memory.py [--cases A,B] [--json FILE]`"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / folder) for folder in ("platform", ".", "bench")]
    from oppo_bench.gpu.memory import main

    sys.exit(main())

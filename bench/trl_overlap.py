"""Gain of our overlap in TRL's PPOTrainer: `build/trl/bin/python bench/trl_overlap.py [--json FILE]` after `make test-trl`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "platform"), str(ROOT / "bench")]  # TRL's environment has none of our packages

from oppo_bench.studies.trl_overlap import main  # noqa: E402

if __name__ == "__main__":
    main()

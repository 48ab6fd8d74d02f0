"""A small language task that a CPU learns in seconds: prompts, answers with a long tail of lengths, a learned reward.

`python -m examples.letters.prepare --out DIR` (from a checkout) or `python -m oppo_cli._examples.letters.prepare --out
DIR` (from a wheel) writes what the specs beside this folder name. The rule itself is `oppo_core.rules.letters:score`.
"""

import os

# Before torch is loaded; why: see oppo_core/__main__.py.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

"""A small language task for CPUs: prompts, responses with long-tailed lengths, a learned reward.

`python -m examples.letters.prepare --out DIR` (checkout) or `python -m oppo_cli._examples.letters.prepare --out DIR` (wheel)
writes the models and prompts of the specs in examples/. The reward rule is `oppo_core.rules.letters:score`.
"""

import os

# Must be set before torch is imported (oppo_core/__main__.py).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

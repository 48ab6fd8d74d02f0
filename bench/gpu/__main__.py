"""`python bench/gpu`: finds the engine beside it, and a stand-in for pydantic where there is none, then measures."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def find_everything() -> None:
    """The checkout's own packages first; the stand-in last, so that an installed pydantic wins."""
    root = HERE.parents[1]
    others = [path for path in sys.path if Path(path).resolve() != HERE]
    sys.path[:] = [*(str(root / folder) for folder in ("platform", ".", "bench")), *others, str(HERE / "bare")]


if __name__ == "__main__":
    find_everything()
    from oppo_bench.gpu.command import main

    sys.exit(main())

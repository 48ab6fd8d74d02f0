"""`python bench/gpu`: puts the checkout's packages on `sys.path`, then measures."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def find_packages() -> None:
    """Put the checkout's source folders first, in place of this one."""
    root = HERE.parents[1]
    others = [path for path in sys.path if Path(path).resolve() != HERE]
    sys.path[:] = [*(str(root / folder) for folder in ("platform", ".", "bench")), *others]


if __name__ == "__main__":
    find_packages()
    from oppo_bench.gpu.command import main

    sys.exit(main())

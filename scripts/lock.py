"""Write requirements/cpu.lock.txt: exact versions of all dependencies, as installed in this environment.

Excludes torch, which requirements/torch.txt installs first, and the CUDA packages of some of its builds. Run `make lock` after
a change of pyproject.toml.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock.txt"
LOCKED_EXTRAS = ("contract", "platform", "worker", "engine", "examples", "client", "docs", "dev")
CUDA_PACKAGES = ("nvidia-", "cuda-", "triton")
# Needed by other Python versions: redis and valkey on 3.11.0 to 3.11.2 (Debian 12 has 3.11.2).
OTHER_PYTHONS = ['async-timeout==5.0.1; python_full_version < "3.11.3"']
HEADER = """\
# Exact versions of the CPU set-up, written by `make lock`; do not edit. torch comes first, from requirements/torch.txt.
"""


def main() -> None:
    """Write the lock file."""
    versions = closure(direct_requirements())
    versions.pop("torch")
    lines = [f"{name}=={Version(version).public}" for name, version in versions.items()]
    lines = sorted(lines + OTHER_PYTHONS)
    LOCK.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{LOCK.relative_to(ROOT)}: {len(lines)} packages")


def direct_requirements() -> list[Requirement]:
    """Requirements in pyproject.toml: build system, project and locked extras."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = settings["project"]["optional-dependencies"]
    texts = [*settings["build-system"]["requires"], *settings["project"]["dependencies"]]
    return [Requirement(text) for text in texts + [text for extra in LOCKED_EXTRAS for text in extras[extra]]]


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Names and installed versions of `requirements` and their dependencies on this platform."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    pending = [(requirement, "") for requirement in requirements]
    while pending:
        requirement, for_extra = pending.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": for_extra}):
            continue
        name = canonicalize_name(requirement.name)
        installed = distribution(name)
        versions[name] = installed.version
        for extra in ["", *requirement.extras]:
            if (name, extra) not in seen:
                seen.add((name, extra))
                required = map(Requirement, installed.requires or [])
                pending += [(dependency, extra) for dependency in required if is_locked(name, dependency)]
    return versions


def is_locked(parent: str, dependency: Requirement) -> bool:
    """Whether a dependency belongs in the lock file; torch's CUDA libraries do not."""
    return not (parent == "torch" and canonicalize_name(dependency.name).startswith(CUDA_PACKAGES))


if __name__ == "__main__":
    main()

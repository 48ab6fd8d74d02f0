"""Write requirements/cpu.lock.txt: exact versions of everything the project needs, as installed in this environment.

Left out: torch, which requirements/torch.txt installs first from whichever index fits the machine, and the CUDA packages
that some builds of it bring. Run `make lock` after a change of pyproject.toml.
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
LOCKED_EXTRAS = ("contract", "platform", "worker", "engine", "client", "docs", "dev")
OF_THE_CUDA_BUILD = ("nvidia-", "cuda-", "triton")
# Needed by other Pythons than the one that writes the lock: redis and valkey on 3.11.0 to 3.11.2 (Debian 12 has 3.11.2).
ELSEWHERE = ['async-timeout==5.0.1; python_full_version < "3.11.3"']
HEADER = """\
# Exact versions of the CPU set-up, written by `make lock`; do not edit. torch comes first, from requirements/torch.txt.
"""


def main() -> None:
    """Write the lock file."""
    versions = closure(direct_requirements())
    versions.pop("torch")
    lines = [f"{name}=={Version(version).public}" for name, version in versions.items()]
    lines = sorted(lines + ELSEWHERE)
    LOCK.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{LOCK.relative_to(ROOT)}: {len(lines)} packages")


def direct_requirements() -> list[Requirement]:
    """What pyproject.toml names: the build system's, the project's and those of every locked extra."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = settings["project"]["optional-dependencies"]
    texts = [*settings["build-system"]["requires"], *settings["project"]["dependencies"]]
    return [Requirement(text) for text in texts + [text for extra in LOCKED_EXTRAS for text in extras[extra]]]


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Names and installed versions of `requirements` and of all that they need here."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        requirement, for_extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": for_extra}):
            continue
        name = canonicalize_name(requirement.name)
        found = distribution(name)
        versions[name] = found.version
        for extra in ["", *requirement.extras]:
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(needed, extra) for needed in map(Requirement, found.requires or []) if wanted(name, needed)]
    return versions


def wanted(parent: str, needed: Requirement) -> bool:
    """Whether a dependency belongs into the lock; torch's CUDA libraries do not."""
    return not (parent == "torch" and canonicalize_name(needed.name).startswith(OF_THE_CUDA_BUILD))


if __name__ == "__main__":
    main()

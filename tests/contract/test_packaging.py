"""Pinned dependencies: pyproject.toml's requirements are locked at an allowed version."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = SETTINGS["project"]["optional-dependencies"]
NOT_LOCKED = ("gpu", "trackers")


def requirements_in(name: str) -> list[Requirement]:
    """The lines of a file under requirements/."""
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def exact(requirement: Requirement) -> Version:
    """The one version a pinned line names."""
    (specifier,) = requirement.specifier
    assert specifier.operator == "=="
    return Version(specifier.version)


LOCKED = {canonicalize_name(line.name): exact(line) for line in requirements_in("cpu.lock.txt")}
TORCH = requirements_in("torch.txt")
DIRECT = [
    *SETTINGS["build-system"]["requires"],
    *SETTINGS["project"]["dependencies"],
    *(text for extra, texts in EXTRAS.items() if extra not in NOT_LOCKED for text in texts),
]


@pytest.mark.parametrize("text", sorted(set(DIRECT)))
def test_every_direct_dependency_is_bounded_and_locked_within_its_bounds(text: str) -> None:
    requirement = Requirement(text)
    assert any(bound.operator in ("<", "==", "~=") for bound in requirement.specifier), "has no upper bound"
    versions = LOCKED | {"torch": exact(TORCH[0])}
    assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


def test_torch_is_installed_first_by_a_plain_pin() -> None:
    assert [line.name for line in TORCH] == ["torch"]
    assert str(TORCH[0]) in EXTRAS["engine"]
    assert "torch" not in LOCKED
    assert not any(name.startswith(("nvidia-cu", "triton")) for name in LOCKED)


@pytest.mark.parametrize("name", sorted(LOCKED))
def test_locked_versions_install_on_every_supported_python(name: str) -> None:
    try:
        needed = metadata(name)["Requires-Python"]
    except PackageNotFoundError:  # of another Python than this one
        return
    least = str(SETTINGS["project"]["requires-python"]).removeprefix(">=")
    assert SpecifierSet(needed or "").contains(f"{least}.0"), f"{name} needs Python {needed}"


def test_deepspeed_is_a_step_of_its_own() -> None:
    wanted = [str(line) for line in requirements_in("deepspeed.txt")]
    assert wanted[0] == "deepspeed==0.19.8"
    assert all("==" in line for line in wanted)
    assert "deepspeed" not in LOCKED
    assert not any("deepspeed" in text for text in DIRECT)


def test_no_step_installs_the_build_tool_that_has_django_ninjas_name() -> None:
    """Both packages bring the module `ninja`; the one that is installed last wins, and the platform starts no more."""
    texts = [(ROOT / "Makefile").read_text(), *(path.read_text() for path in (ROOT / "requirements").glob("*.txt"))]
    lines = [line.strip() for text in texts for line in text.splitlines() if not line.startswith("#")]
    assert not [line for line in lines if re.search(r"(?<![-\w])ninja(?![-\w])", line)]
    assert "--no-deps -r requirements/deepspeed.txt" in texts[0]


def test_the_lock_needs_no_hashes_and_no_index() -> None:
    text = (ROOT / "requirements" / "cpu.lock.txt").read_text(encoding="utf-8")
    assert "--hash" not in text
    assert "://" not in text
    assert "+" not in text


def test_ci_runs_make_test() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    listed = subprocess.run(["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "demo", "test", "test-full", "test-backends", "lint", "lock", "deepspeed"):
        assert f"make {target} " in listed

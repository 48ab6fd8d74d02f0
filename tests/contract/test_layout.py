"""The layout and the import rules (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join([str(ROOT / "platform"), str(ROOT)])

# Celery would import Django if it found this variable.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"}

# Imports every module of a package (but those that run on import), then names the forbidden ones that came along.
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
if sys.argv[1] == "oppo_platform":
    import django, os
    os.environ["DJANGO_SETTINGS_MODULE"] = "oppo_platform.settings"
    django.setup()
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if module.name.rpartition(".")[2] not in ("__main__", "settings", "file_transfer"):  # the last one needs vLLM
        importlib.import_module(module.name)
print(*sorted(name for name in sys.argv[2:] if name in sys.modules))
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in the checkout, with its output captured."""
    return subprocess.run(
        command, cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": PATHS, **environment}, capture_output=True, text=True, check=False
    )


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks and that exist."""
    listed = run("git", "ls-files", "-z", "--", *patterns)
    assert listed.returncode == 0, listed.stderr
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_platform_is_a_folder_and_not_a_package() -> None:
    # A platform/__init__.py would shadow Python's own platform module, and manage.py would not start.
    assert not (ROOT / "platform" / "__init__.py").exists()
    found = run(sys.executable, "-c", "import platform; print(platform.__file__)").stdout.strip()
    assert Path(found).parent == Path(sysconfig.get_paths()["stdlib"])


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("oppo_contract", ("torch", "transformers", "django", "celery", "httpx")),
        ("oppo_estimate", ("torch", "transformers", "django", "celery", "oppo_core")),
        ("oppo_client", ("torch", "transformers", "django", "celery", "oppo_platform")),
        ("oppo_platform", ("torch", "transformers", "oppo_core", "worker", "oppo_client", "oppo_cli")),
        # kombu looks for one of Django's types when Django is installed; the worker itself must not use it.
        ("worker", ("torch", "transformers", "oppo_core", "django.db", "oppo_platform")),
        ("oppo_core", ("django", "celery", "worker", "oppo_platform", "oppo_client")),
    ],
)
def test_imports_of_each_package_are_limited(package: str, never: tuple[str, ...], tmp_path: Path) -> None:
    done = run(sys.executable, "-c", IMPORT_ALL, package, *never, OPPO_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def outside_imports(package: Path) -> set[str]:
    """Top-level names that a package imports, the standard library's and its own left out."""
    names: set[str] = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: a relative import"
                names.add(node.module or "")
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {package.name}


def test_the_contract_and_the_client_import_little() -> None:
    assert outside_imports(ROOT / "platform" / "oppo_contract") <= {"pydantic", "pydantic_core", "ruamel"}
    assert outside_imports(ROOT / "platform" / "oppo_client") <= {"httpx"}


def test_the_contract_imports_ruamel_only_when_it_reads_yaml() -> None:
    done = run(sys.executable, "-c", "import sys, oppo_contract, oppo_contract.yaml_text; print('ruamel.yaml' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_the_command_line_starts_without_its_parts() -> None:
    done = run(
        sys.executable,
        "-c",
        "import sys, oppo_cli.main; print(*[m for m in ('torch', 'django', 'celery', 'oppo_core') if m in sys.modules])",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_import_rules_hold() -> None:
    done = run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_modules_import_each_other_in_a_circle() -> None:
    # Imports inside functions and for types only count too: they hide a circle, they do not open it.
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(reversed(error.args[1])))


def test_every_package_stands_under_the_import_rules() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    included = project["hatch"]["build"]["targets"]["wheel"]["only-include"]
    packages = {Path(path).name for path in included if path != "build/site"}
    rules = project["importlinter"]
    assert set(rules["root_packages"]) == packages
    # A rule may also stand for a part of a package.
    ruled = {name for rule in rules["contracts"] for name in rule.get("source_modules", rule.get("containers", []))}
    assert {name for name in ruled if "." not in name} == packages - {"oppo_bench"}
    assert {name.partition(".")[0] for name in ruled} <= packages


def test_no_file_names_a_path_of_one_machine() -> None:
    machine_path = re.compile("/wor" + "k/|/roo" + "t/")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.suffix not in {".png", ".ico", ".woff2", ".gz", ".br", ".safetensors"}
        for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if machine_path.search(text)
    ]
    assert found == []


def test_no_unfinished_code() -> None:
    unfinished = re.compile("NotImplemented" + "Error|TO" + "DO|FIX" + "ME|# type: ignore$|# noqa$")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked("*.py", "*.html", "*.js", "*.css")
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if unfinished.search(text)
    ]
    assert found == []


def test_tests_do_not_live_where_they_would_hide_a_module() -> None:
    assert not (ROOT / "tests" / "platform").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()

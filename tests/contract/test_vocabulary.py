"""Identifiers and modules that were renamed to the field's words do not come back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("oppo_core", "worker", "platform", "bench", "scripts", "examples")

# Retired module name: what replaced it.
MODULES = {
    "careful": "update/strategies",
    "whole_batch": "gather_batch",
}
# Retired identifier: what to write.
IDENTIFIERS = {
    "let_go": "release",
}


def sources() -> list[Path]:
    """Python files of the product, migrations apart: they are history."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in files if "migrations" not in path.parts)


def identifiers(tree: ast.AST) -> set[str]:
    """Every name that a module defines, binds or reads."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(asname=str(name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.keyword(arg=str(name)):
                names.add(name)
    return names


def test_no_retired_module_name_is_used() -> None:
    used = {path.stem for path in sources()} & MODULES.keys()
    assert {name: MODULES[name] for name in used} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_retired_identifier_is_used(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}": f"write {IDENTIFIERS[name]}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] == folder
        for name in identifiers(ast.parse(path.read_text(encoding="utf-8"))) & IDENTIFIERS.keys()
    }
    assert found == {}

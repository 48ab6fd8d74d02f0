"""Native modules in the built files: every import names a hashed file, and pages load what a module imports at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.template import Context, Template

ROOT = Path(__file__).resolve().parents[3]
IMPORTED = re.compile(r"""(?:\bfrom\s*|\bimport\s*\(?)["'](\.[^"']+)["']""")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `manage.py buildstatic` writes."""
    home = tmp_path_factory.mktemp("home")
    environ = os.environ | {"OPPO_HOME": str(home), "DJANGO_SETTINGS_MODULE": "oppo_platform.settings"}
    command = [sys.executable, str(ROOT / "manage.py"), "buildstatic"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return home / "static"


def test_every_import_of_a_built_module_names_a_hashed_file_that_exists(built: Path) -> None:
    hashed = [path for path in (built / "js").rglob("*.js") if re.search(r"\.[0-9a-f]{12}\.js$", path.name)]
    assert len(hashed) == len(list((ROOT / "static/js").rglob("*.js")))
    for path in hashed:
        for name in IMPORTED.findall(path.read_text()):
            assert re.search(r"\.[0-9a-f]{12}\.js$", name), f"{path.name} imports {name}, which browsers would not cache"
            assert (path.parent / name).is_file(), f"{path.name} imports {name}"


def test_a_page_loads_the_imports_of_its_modules_at_once_and_each_once() -> None:
    page = Template('{% load modules %}{% module "core/shell.js" %}{% module "run/training-first.js" %}').render(Context())
    preloads = re.findall(r'<link rel="modulepreload" href="/static/js/([^"]+)">', page)
    scripts = re.findall(r'<script type="module" src="/static/js/([^"]+)">', page)
    assert scripts == ["core/shell.js", "run/training-first.js"]
    assert len(preloads) == len(set(preloads))
    assert {"core/keys.js", "run/store.js", "run/training-charts.js", "charts/plotly-theme.js"} <= set(preloads)
    assert "run/training.js" not in preloads, "it is loaded after the first charts"

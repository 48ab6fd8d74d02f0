"""The OpenAPI document is enough for a client: openapi-python-client generates one, which submits, watches and reads a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]
ROOT = Path(__file__).resolve().parents[2]
# Media types that the generator does not know.
CONFIG = """\
content_type_overrides:
  application/problem+json: application/json
  application/x-tar: application/octet-stream
  application/x-ndjson: text/plain
  application/yaml: text/plain
  text/event-stream: text/plain
post_hooks: []
"""


@pytest.fixture(scope="module")
def tools_python() -> Path:
    """Python of an environment of its own with the generator."""
    made = ROOT / "build" / "test-tools"
    make = ["sh", "scripts/side_environment.sh", sys.prefix, str(made), "requirements/test-tools.txt"]
    subprocess.run(make, cwd=ROOT, check=True)
    return made / "bin" / "python"


def test_a_generated_client_submits_watches_and_reads_a_run(platform, tools, tmp_path: Path, tools_python: Path) -> None:
    document, config = tmp_path / "openapi.json", tmp_path / "config.yaml"
    document.write_bytes(platform.http.get("openapi.json").content)
    config.write_text(CONFIG)
    generator = [tools_python, "-m", "openapi_python_client", "generate", "--path", document, "--config", config]
    made = subprocess.run(
        [*generator, "--output-path", tmp_path / "client", "--fail-on-warning"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    user = [tools_python, Path(__file__).with_name("generated_client_user.py"), platform.base_url]
    token = platform.http.headers["Authorization"].removeprefix("Bearer ")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "client")}
    platform.wait_for_end(platform.submit(tools.tiny_spec("before")))  # the worker has reported its catalogue
    done = subprocess.run(user, env=environ, input=token, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["states"][-1], found["state"]) == ("succeeded", "succeeded")
    assert found["steps"] == list(range(1, 13))
    assert found["listed"] == [found["id"]]
    assert (found["streamed"] > 0, found["log_lines"]) == (True, 5)
    assert found["refused"] == ["steps"]
    assert "batch_size: 8" in found["spec"]

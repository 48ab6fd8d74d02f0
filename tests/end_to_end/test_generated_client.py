"""The OpenAPI document is enough for a client: openapi-python-client generates one, which submits, watches and reads a run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from oppo_bench.peer_environment import Packages, ensure_environment

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]
ROOT = Path(__file__).resolve().parents[2]
GENERATOR = Packages("openapi-python-client", ("openapi-python-client==0.29.1",))
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
def generator_python() -> Path:
    """Python of an environment of its own with the generator."""
    return ensure_environment(ROOT / "build" / "client-generator", GENERATOR, print)


def test_a_generated_client_submits_watches_and_reads_a_run(platform, tools, tmp_path: Path, generator_python: Path) -> None:
    document, config = tmp_path / "openapi.json", tmp_path / "config.yaml"
    document.write_bytes(platform.http.get("openapi.json").content)
    config.write_text(CONFIG)
    generator = [generator_python, "-m", "openapi_python_client", "generate", "--path", document, "--config", config]
    made = subprocess.run(
        [*generator, "--output-path", tmp_path / "client", "--fail-on-warning"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    user = [generator_python, Path(__file__).with_name("generated_client_user.py"), platform.base_url]
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

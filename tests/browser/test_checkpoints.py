"""The Checkpoints tab: a new one appears by itself, and a real server sends its files."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from oppo_contract import wire

pytestmark = pytest.mark.browser


def test_a_checkpoint_appears_and_is_downloaded(visit, platform, tmp_path, settings):
    from oppo_platform.runs.attempts import artifact_url

    settings.OPPO_ARTIFACT_ROOT = tmp_path.as_uri()
    run_id = platform.submit("letters saved", steps=30)
    supervisor, _ = platform.start(run_id)
    page = visit().page
    page.goto(f"/runs/{run_id}/checkpoints")
    page.wait_for_selector("#checkpoints >> text=No checkpoint yet")
    url = f"{artifact_url(run_id)}/checkpoints/step-00000010-chunk-000003"
    folder, weights = Path(unquote(urlsplit(url).path)), b"w" * 3_000_001
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    manifest = json.dumps({"model.safetensors": {"sha256": hashlib.sha256(weights).hexdigest(), "bytes": len(weights)}})
    (folder / "manifest.json").write_text(manifest)
    told = wire.CheckpointRegistration(
        epoch=1, step=10, url=url, manifest_sha256=hashlib.sha256(manifest.encode()).hexdigest(), bytes=len(weights)
    )
    platform.fleet._post(f"{supervisor.path}/checkpoints", supervisor.claimed.attempt_token, told)
    page.reload()
    page.wait_for_selector("#checkpoints >> text=the next attempt begins here")
    page.wait_for_selector("#checkpoints >> text=and a half-done step")
    with page.expect_download() as started:
        page.click("text=Download")
    with tarfile.open(started.value.path()) as archive:
        assert archive.extractfile("step-00000010-chunk-000003/model.safetensors").read() == weights

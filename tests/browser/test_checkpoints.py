"""The Checkpoints tab: a new one appears by itself, and a real server sends its files."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import expect

from oppo_contract import wire

pytestmark = pytest.mark.browser


def saved(platform, supervisor, run_id, name, step):
    """A checkpoint of the run on disk, and registered; returns its weights."""
    from oppo_platform.runs.attempts import artifact_url

    url = f"{artifact_url(run_id)}/checkpoints/{name}"
    folder, weights = Path(unquote(urlsplit(url).path)), b"w" * 3_000_001
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    manifest = json.dumps({"model.safetensors": {"sha256": hashlib.sha256(weights).hexdigest(), "bytes": len(weights)}})
    (folder / "manifest.json").write_text(manifest)
    told = wire.CheckpointRegistration(
        epoch=1, step=step, url=url, manifest_sha256=hashlib.sha256(manifest.encode()).hexdigest(), bytes=len(weights)
    )
    platform.fleet._post(f"{supervisor.path}/checkpoints", supervisor.claimed.attempt_token, told)
    return weights


def test_a_checkpoint_appears_and_is_downloaded_forked_and_gone_back_to(visit, platform, tmp_path, settings):
    from oppo_platform.runs.lifecycle import pause_run

    settings.OPPO_ARTIFACT_ROOT = tmp_path.as_uri()
    run_id = platform.submit("letters saved", steps=30)
    supervisor, _ = platform.start(run_id)
    page = visit().page
    page.goto(f"/runs/{run_id}/checkpoints")
    page.wait_for_selector("#checkpoints >> text=No checkpoint yet")
    saved(platform, supervisor, run_id, "step-00000005", 5)
    weights = saved(platform, supervisor, run_id, "step-00000010-chunk-000003", 10)
    page.reload()
    row = page.locator("#checkpoints tr")
    row.nth(0).locator("text=next attempt resumes here").wait_for()
    page.wait_for_selector("#checkpoints >> text=mid-step")
    with page.expect_download() as started:
        row.nth(0).locator("text=Download").click()
    with tarfile.open(started.value.path()) as archive:
        assert archive.extractfile("step-00000010-chunk-000003/model.safetensors").read() == weights
    page.click("[aria-label='Fork from here, step 5']")
    page.wait_for_selector("text=at step 5, with its state")
    page.wait_for_selector("#send[aria-disabled=false]")
    page.fill("#f-ppo-batch_size", "8")
    page.wait_for_selector("#problems >> text=cannot differ from run")
    page.go_back()
    pause_run(run_id, "user:test")
    supervisor.end("paused")
    page.reload()
    page.click("[data-resume-at]")
    page.wait_for_selector("text=Resume from step 5?")
    page.click("#resume-sure")
    row.nth(1).locator("text=next attempt resumes here").wait_for()
    expect(row.nth(0).locator("text=next attempt resumes here")).to_have_count(0)

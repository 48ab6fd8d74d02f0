"""Checkpoints over the API: which the next attempt begins with, which can be read here, archives of nothing but their files."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from oppo_platform.accounts.models import AuditEntry
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.models import Checkpoint

FILES = {"actor/model.safetensors": b"w" * 70_001, "state.json": b"{}", "empty": b""}


@pytest.fixture
def saved(world, settings, tmp_path):
    """(world, run, save): a run that trains; `save(step)` writes a checkpoint and registers it, and returns (folder, row)."""
    settings.OPPO_ARTIFACT_ROOT = tmp_path.as_uri()
    worker = world.worker()
    run, attempt_id = world.start(worker)

    def save(step, files=FILES, **manifest):
        url = f"{artifact_url(run.pk)}/checkpoints/step-{step:08d}"
        folder = Path(unquote(urlsplit(url).path))
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        listed = {name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)} for name, content in files.items()}
        text = json.dumps({**listed, **manifest})
        (folder / "manifest.json").write_text(text)
        told = {
            "epoch": 1,
            "step": step,
            "url": url,
            "manifest_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "bytes": 70_003,
        }
        assert worker.attempt(attempt_id, "checkpoints", told).status_code == 200
        return folder, Checkpoint.objects.get(run=run, step=step)

    return world, run, save


def download(client, run, row):
    return client.get(f"/api/v1/runs/{run.pk}/checkpoints/{row.pk}/download")


def test_available_checkpoints_and_the_resume_checkpoint(saved):
    world, run, save = saved
    old, _ = save(2)
    save(4)
    (old / "manifest.json").unlink()
    client = world.login("vic")
    items = client.get(f"/api/v1/runs/{run.pk}/checkpoints").json()["items"]
    told = [(item["step"], item["files"], item["resumes"], item["attempt"], item["node"]) for item in items]
    assert told == [(4, "here", True, 1, "node1"), (2, "deleted", False, 1, "node1")]
    page = client.get(f"/runs/{run.pk}/checkpoints").content.decode()
    assert "next attempt resumes here" in page
    assert "/download" not in page  # a viewer only looks
    Checkpoint.objects.update(url="s3://bucket/runs/1/checkpoints/step-00000004")
    items = client.get(f"/api/v1/runs/{run.pk}/checkpoints").json()["items"]
    assert {item["files"] for item in items} == {"elsewhere"}


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")
def test_a_download_is_the_whole_checkpoint_and_goes_into_the_log(saved):
    world, run, save = saved
    folder, row = save(4)
    client = world.login("ben")
    assert "/download" in client.get(f"/runs/{run.pk}/checkpoints?part=1").content.decode()
    reply = download(client, run, row)
    content = b"".join(reply)  # at once; a real server reads it piece by piece
    reply.close()
    assert (reply.status_code, int(reply.headers["Content-Length"])) == (200, len(content))
    assert f'filename="run-{run.pk}-step-00000004.tar"' in reply.headers["Content-Disposition"]
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive.getmembers()}
    manifest = (folder / "manifest.json").read_bytes()
    assert found == {f"step-00000004/{name}": data for name, data in {**FILES, "manifest.json": manifest}.items()}
    entry = AuditEntry.objects.get(action="checkpoint.download")
    assert (entry.actor, entry.details) == ("user:ben", {"step": 4})


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")
def test_a_download_goes_on_from_any_byte(saved):
    world, run, save = saved
    _, row = save(4)
    client, path = world.login("ben"), f"/api/v1/runs/{run.pk}/checkpoints/{row.pk}/download"

    def fetch(**headers):
        reply = client.get(path, headers=headers)
        content = b"".join(reply) if reply.streaming else b""
        reply.close()
        return reply, content

    first, whole = fetch()
    tag = first.headers["ETag"]
    assert (first.headers["Accept-Ranges"], tag) == ("bytes", f'"{row.manifest_sha256}"')
    # Into headers, contents and padding, at their first and last bytes, and into the end of the archive.
    blocks = [*range(0, 2561, 512), *range(len(whole) - 2560, len(whole), 512)]
    places = {n + near for n in blocks for near in (-1, 0, 1)} | {len(whole) - 1}
    for begin in sorted(n for n in places if 0 < n < len(whole)):
        reply, rest = fetch(Range=f"bytes={begin}-", If_Range=tag)
        assert (reply.status_code, rest == whole[begin:]) == (206, True), begin
        assert reply.headers["Content-Range"] == f"bytes {begin}-{len(whole) - 1}/{len(whole)}"
        assert int(reply.headers["Content-Length"]) == len(rest)
    for begin, last in ((0, 0), (5, 9), (511, 1024), (0, len(whole) - 2), (len(whole) - 1, len(whole) + 9)):
        reply, part = fetch(Range=f"bytes={begin}-{last}", If_Range=tag)
        end = min(last, len(whole) - 1)
        assert (reply.status_code, part == whole[begin : end + 1]) == (206, True), (begin, last)
        assert reply.headers["Content-Range"] == f"bytes {begin}-{end}/{len(whole)}"
        assert int(reply.headers["Content-Length"]) == len(part)
    past, _ = fetch(Range=f"bytes={len(whole)}-")
    assert (past.status_code, past.headers["Content-Range"]) == (416, f"bytes */{len(whole)}")
    for headers in (
        {"Range": "bytes=5-", "If_Range": '"another"'},
        {"Range": "bytes=9-5"},
        {"Range": "bytes=5-9,20-29"},
        {"Range": "bytes=-9"},
        {"Range": "lines=5-"},
        {"Range": "bytes=0-"},
    ):
        reply, content = fetch(**headers)
        assert (reply.status_code, content == whole) == (200, True), headers


def test_downloads_require_permission(saved):
    world, run, save = saved
    _, row = save(4)
    assert download(world.login("vic"), run, row).status_code == 403
    assert download(world.login("eve"), run, row).status_code == 404
    other = world.submit()
    assert download(world.login("ada"), other, row).status_code == 404
    assert world.login("eve").get(f"/runs/{run.pk}/checkpoints").status_code == 404
    assert not AuditEntry.objects.filter(action="checkpoint.download").exists()


def test_only_registered_files_are_downloaded(saved, tmp_path):
    world, run, save = saved
    (tmp_path / "secret").write_text("hush")
    ada = world.login("ada")
    listed = {"sha256": "", "bytes": 4}
    for step, name in enumerate(("../../../../secret", str(tmp_path / "secret"), "actor/../../../../../secret", ""), start=1):
        _, row = save(step, **{name: listed})
        assert download(ada, run, row).status_code == 409, name
    folder, row = save(5, **{"link": listed, "sub/secret": listed})
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "sub").symlink_to(tmp_path)
    assert download(ada, run, row).status_code == 409
    folder, row = save(6)
    (folder / "state.json").write_text("longer")
    assert download(ada, run, row).status_code == 409
    folder, row = save(7)
    (folder / "manifest.json").write_text("{}")
    assert "differs from the registered one" in download(ada, run, row).json()["detail"]
    folder, row = save(8)
    for url in (f"{artifact_url(run.pk)}/../../", f"{artifact_url(run.pk)}/%2e%2e/%2e%2e", tmp_path.as_uri(), "file:///etc"):
        Checkpoint.objects.filter(pk=row.pk).update(url=url)
        assert download(ada, run, row).status_code == 409, url

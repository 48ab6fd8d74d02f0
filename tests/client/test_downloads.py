"""Checkpoints come down whole and checked, or not at all, and go on where they broke off."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

import pytest

from oppo_client import Client, Conflict, DownloadError, Forbidden, NoCheckpoint, Retries, Unreachable
from oppo_client.messages import Request
from tests.client.conftest import FILES, QUICK
from tests.client.misbehaving import HANG_UP, Answer, misbehaving, said, summary


@pytest.fixture
def saved(client, live, spec, save):
    """(run, folder on the platform, save): a run that trains, with a checkpoint of step 3."""
    run = client.submit(spec("saving"))
    supervisor, story = live.start(run.id)
    supervisor.tell(list(story.tell(5)))
    return run, save(supervisor, 3), lambda step: save(supervisor, step)


def test_the_newest_comes_down_and_is_there_the_second_time(saved, tmp_path):
    run, _, save = saved
    save(5)
    out = tmp_path / "new" / "out"
    got = run.checkpoint("latest").download(out)
    assert got == out / "step-00000005"
    assert {name: (got / name).read_bytes() for name in FILES} == FILES
    assert [path.name for path in out.iterdir()] == [got.name]  # nothing is left over
    (got / "state.json").write_text("mine")
    assert run.checkpoint().download(out) == got
    assert (got / "state.json").read_text() == "mine"
    (got / "manifest.json").write_text("{}")
    with pytest.raises(DownloadError, match="is not this checkpoint"):
        run.checkpoint().download(out)
    assert run.checkpoint(3).download(out) == out / "step-00000003"
    assert run.checkpoint("step-00000003").step == 3
    assert [c.step for c in run.checkpoints()] == [5, 3]
    assert "step=5" in repr(run.checkpoint())


def test_a_download_goes_on_where_it_broke_off(saved, live, token, client, tmp_path, monkeypatch):
    """Through a proxy that breaks off again and again; only what is lacking is sent."""
    run, _, _ = saved
    passed = []

    def decide(asked):
        import httpx

        headers = {k: v for k, v in asked.headers.items() if k in ("authorization", "range", "if-range", "accept")}
        reply = httpx.get(live.web.url + asked.path, headers={**headers, "accept-encoding": "identity"})
        kept = {k: v for k, v in reply.headers.items() if k in ("content-type", "content-range", "etag")}
        passed.append((asked.headers.get("range"), reply.status_code, len(reply.content)))
        cut = 300_000 if "/download" in asked.path else None
        return Answer(reply.status_code, reply.content, kept, cut)

    with misbehaving(HANG_UP) as proxy, Client(proxy.url, token, retries=Retries(most=1, first_s=0.01)) as c:
        proxy.decide = decide
        got = c.get(run.id).checkpoint().download(tmp_path)
    assert {name: (got / name).read_bytes() for name in FILES} == FILES
    sent = [part for part in passed if part[2] > 10_000]
    assert [part[:2] for part in sent] == [(None, 200), *((f"bytes={n * 300_000}-", 206) for n in (1, 2, 3))]
    assert sent[1][2] == sent[0][2] - 300_000


def test_partial_download_of_another_call_is_resumed(saved, client, tmp_path):
    run, _, _ = saved
    one = run.checkpoint()
    whole = client._session.send(Request("GET", f"runs/{run.id}/checkpoints/{one.id}/download")).content
    part = tmp_path / f".{one.name}.{run.id}-{one.id}.tar.part"
    part.write_bytes(whole)  # all of it: nothing is lacking, and the platform says so (416)
    assert (one.download(tmp_path) / "empty").read_bytes() == b""
    assert not part.exists()


def test_forbidden_and_missing_downloads(saved, live, client, tmp_path):
    from oppo_platform.accounts.models import Membership

    run, folder, _ = saved
    with pytest.raises(NoCheckpoint, match="available steps: 3"):
        run.checkpoint(4)
    one = run.checkpoint()
    Membership.objects.filter(user=live.user).update(role="viewer")
    try:
        with pytest.raises(Forbidden):
            one.download(tmp_path)
    finally:
        Membership.objects.filter(user=live.user).update(role="owner")
    (folder / "state.json").write_text("longer than before")
    with pytest.raises(Conflict, match=r"state\.json"):
        one.download(tmp_path)
    (folder / "manifest.json").unlink()
    with pytest.raises(NoCheckpoint):
        run.checkpoint()
    assert list(tmp_path.iterdir()) == []


def tar_of(members, manifest=None):
    """(tar, what the platform would tell of it); `members`: (name or TarInfo, content)."""
    listed = {n: {"sha256": hashlib.sha256(c).hexdigest(), "bytes": len(c)} for n, c in members if isinstance(n, str)}
    text = json.dumps(listed if manifest is None else manifest).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in [("manifest.json", text), *members]:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(f"c/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    told = {"id": 1, "step": 1, "name": "c", "bytes": 1, "files": "here", "registered_at": "2026-11-01T12:00:00Z"}
    return out.getvalue(), {**told, "manifest_sha256": hashlib.sha256(text).hexdigest()}


def special(name, kind, target=""):
    info = tarfile.TarInfo(f"c/{name}")
    info.type, info.linkname = kind, target
    return info


ENTRY = {"sha256": hashlib.sha256(b"x").hexdigest(), "bytes": 1}
EVIL = {
    "a way out": ([("../evil", b"x")], None),
    "an absolute path": ([("/tmp/evil", b"x")], None),
    "a link": ([(special("link", tarfile.SYMTYPE, "/etc/passwd"), b"")], {"link": ENTRY}),
    "a hard link": ([(special("link", tarfile.LNKTYPE, "c/manifest.json"), b"")], {"link": ENTRY}),
    "a device": ([(special("null", tarfile.CHRTYPE), b"")], {"null": ENTRY}),
    "not in the manifest": ([("a", b"x"), ("b", b"x")], {"a": ENTRY}),
    "missing": ([("a", b"x")], {"a": ENTRY, "b": ENTRY}),
    "twice": ([("a", b"x"), ("a", b"x")], {"a": ENTRY}),
    "damaged": ([("a", b"y")], {"a": ENTRY}),
    "too long": ([("a", b"xy")], {"a": ENTRY}),
    "a manifest without digests": ([("a", b"x")], {"a": {}}),
    "a manifest in a list": ([("a", b"x")], []),
    "a file as a folder": ([("a", b"x"), ("a/b", b"x")], {"a": ENTRY, "a/b": ENTRY}),
}


@pytest.mark.parametrize("case", EVIL)
def test_an_archive_that_is_not_the_checkpoint_leaves_nothing(case, tmp_path):
    content, told = tar_of(*EVIL[case])
    out = tmp_path / "out"
    with pytest.raises(DownloadError):
        download_from(content, told, out)
    assert list(out.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def download_from(content, told, out):
    """Download from a server that answers with this."""
    run = summary("running")

    def decide(asked):
        if asked.path.endswith("/download"):
            return Answer(200, content, {"Content-Type": "application/x-tar"})
        return said({"items": [told], "next": None} if "/checkpoints?" in asked.path else run)

    with misbehaving(HANG_UP) as server, Client(server.url, "t", retries=QUICK) as c:
        server.decide = decide
        return c.get(7).checkpoint().download(out)


def test_another_manifest_or_no_archive_or_a_name_that_leads_away(tmp_path):
    content, told = tar_of([("a", b"x")])
    assert (download_from(content, told, tmp_path) / "a").read_bytes() == b"x"
    for name in ("../c", "/c", ".c", "", "c\x1b[2J"):
        with pytest.raises(DownloadError, match="not a valid folder name"):
            download_from(content, {**told, "name": name}, tmp_path / "out")
    with pytest.raises(DownloadError, match="manifest differs"):
        download_from(content, {**told, "manifest_sha256": "0" * 64}, tmp_path / "out")
    with pytest.raises(DownloadError):
        download_from(b"<html>not a tar", told, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_partial_download_is_kept_after_a_failure(tmp_path):
    content, told = tar_of([("a", b"x" * 100_000)])
    run = summary("running")
    broken = Answer(200, content, {"Content-Type": "application/x-tar"}, cut=50_000)
    answers = [said(run), said({"items": [told], "next": None}), broken, HANG_UP]
    with misbehaving(*answers) as server, Client(server.url, "t", retries=Retries(most=1, first_s=0.01)) as c:
        with pytest.raises(Unreachable):
            c.get(7).checkpoint().download(tmp_path)
        assert server.asked[-1].headers["range"] == "bytes=50000-"
        assert server.asked[-1].headers["if-range"] == f'"{told["manifest_sha256"]}"'
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [(".c.7-1.tar.part", 50_000)]

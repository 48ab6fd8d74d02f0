"""`oppo doctor` on the test's own platform: what is well, what is not, and a bundle without secrets."""

from __future__ import annotations

import json
import tarfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings

from oppo_platform.accounts.api_tokens import create_api_token
from oppo_platform.accounts.models import ApiToken
from oppo_platform.cluster.models import Node
from oppo_platform.diagnosis import checks
from oppo_platform.diagnosis.bundle import shown_settings, write_bundle
from oppo_platform.diagnosis.checks import Finding, check_nodes, run_checks
from oppo_platform.scheduling.models import SchedulerBeat


def by_check(found: Any) -> dict[str, Finding]:
    return {finding.check: finding for finding in found}


def test_every_check_has_a_result_and_says_what_to_do(world: Any, redis_url: str, settings: Any, tmp_path: Path) -> None:
    settings.REDIS_URL, settings.OPPO_HOME, settings.OPPO_BASE_URL = redis_url, tmp_path, "http://127.0.0.1:9"
    world.worker()
    world.cycle()
    found = by_check(run_checks())
    assert [found[name].status for name in ("database", "migrations", "broker", "scheduler", "node node1")] == ["ok"] * 5
    assert (found["web"].status, found["housekeeper"].status, found["mail"].status) == ("failed", "failed", "skipped")
    assert all(finding.advice for finding in found.values() if finding.status in ("failed", "warning"))


def test_a_check_that_fails_itself_is_a_finding(
    world: Any, settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings.OPPO_HOME = tmp_path
    monkeypatch.setattr(checks, "describe_low_disks", lambda: 1 / 0)
    found = by_check(run_checks())
    assert (found["nodes"].status, "ZeroDivisionError" in found["nodes"].detail) == ("failed", True)


def test_nodes_that_are_silent_old_or_of_another_time(world: Any) -> None:
    for name in ("well", "ahead", "silent", "old"):
        world.worker(name)
    Node.objects.filter(name="ahead").update(clock_skew_s=90.0)
    Node.objects.filter(name="silent").update(last_seen_at=world.clock.now() - timedelta(hours=1))
    Node.objects.filter(name="old").update(wire_version=1)
    found = [(finding.check, finding.status) for finding in check_nodes()]
    assert ("node well", "ok") in found
    assert ("clock of node ahead", "warning") in found
    assert ("node silent", "warning") in found
    assert ("node old", "failed") in found


def test_a_heartbeat_tells_the_clock_of_its_node(world: Any) -> None:
    worker = world.worker()
    at = world.clock.now().timestamp() + 42
    reply = worker.post("heartbeat", {"devices": [], "attempts": [], "time": at}, worker.token)
    assert reply.status_code == 200
    assert Node.objects.get().clock_skew_s == pytest.approx(42)


def test_the_token_of_the_stream_check_is_gone_afterwards(world: Any, settings: Any) -> None:
    settings.OPPO_BASE_URL = "http://127.0.0.1:9"
    world.worker()
    world.submit()
    assert [finding.status for finding in checks.check_stream()] == ["failed"]
    assert not ApiToken.objects.exists()


def test_the_bundle_holds_no_secret(world: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.OPPO_HOME = tmp_path
    token = create_api_token(world.people["ada"], world.team, "t").text
    secrets = ["s3cret-password", "smtp-passw0rd", token.rpartition("_")[2], django_settings.SECRET_KEY, "an-own-key-of-mine"]
    monkeypatch.setenv("DATABASE_URL", "postgresql://oppo:s3cret-password@db:5432/oppo")
    monkeypatch.setenv("OPPO_SMTP_URL", "smtp://mail:smtp-passw0rd@mx:587")
    monkeypatch.setenv("OPPO_SECRETS_KEYS", "an-own-key-of-mine")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "web.log").write_text(
        "\n".join(["before", *(f"it said {secret}" for secret in secrets if secret not in token), token, "after"])
    )
    SchedulerBeat.objects.all().delete()
    file = tmp_path / "report.tar.gz"
    write_bundle(file, [Finding("web", "failed", f"refused {token}", "Read the log.")])
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        texts = {member.name: archive.extractfile(member).read().decode() for member in archive.getmembers()}  # type: ignore[union-attr]
    whole = "\n".join(texts.values())
    assert not [secret for secret in secrets if secret in whole]
    assert "before" in whole
    assert "after" in whole
    assert json.loads(texts["oppo-doctor/settings.json"])["DATABASE_URL"] == "postgresql://oppo:…@db:5432/oppo"
    assert "pytest" in json.loads(texts["oppo-doctor/versions.json"])["packages"]
    with pytest.raises(FileExistsError):
        write_bundle(file, [])


def test_secrets_among_the_settings_are_only_named() -> None:
    shown = shown_settings({"OPPO_SECRET_KEY": "k", "OPPO_REWARD_TOKEN": "t", "OPPO_API_RATE": "600", "HOME": "/root"})
    assert shown == {"OPPO_SECRET_KEY": "…", "OPPO_REWARD_TOKEN": "…", "OPPO_API_RATE": "600"}

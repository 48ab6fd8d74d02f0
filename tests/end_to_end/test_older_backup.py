"""A backup of commit f5bbdf8 (tests/fixtures/f5bbdf8) is restored into a new home; its runs are shown, and resumed."""

from __future__ import annotations

import fcntl
import json
import lzma
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]
OLDER = Path(__file__).parents[1] / "fixtures" / "f5bbdf8"
ARTIFACTS = Path("/tmp/oppo-f5bbdf8")  # where the backup has registered its checkpoints
THEN: dict[str, Any] = json.loads((OLDER / "backup.json").read_text())
RUNS: dict[str, int] = THEN["runs"]
TABS = ("", "/timeline", "/utilization", "/samples", "/logs", "/config", "/checkpoints", "/events")
PAGES = ("/runs", "/alerts", "/queue", "/sharing", "/teams", "/teams/1", "/teams/1/alerts", "/teams/1/audit", "/teams/1/storage")


@pytest.fixture(scope="module")
def artifacts() -> Iterator[Path]:
    """The folder, for this session alone: others on this machine restore to the same one."""
    parent = os.open(ARTIFACTS.parent, os.O_RDONLY)
    fcntl.flock(parent, fcntl.LOCK_EX)
    shutil.rmtree(ARTIFACTS, ignore_errors=True)
    try:
        yield ARTIFACTS
    finally:
        shutil.rmtree(ARTIFACTS, ignore_errors=True)
        os.close(parent)


@pytest.fixture(scope="module")
def older(home: Path, tools: Any, artifacts: Path) -> Iterator[Any]:
    """The platform of the backup, started."""
    (home / "older.tar").write_bytes(lzma.decompress((OLDER / "backup.tar.xz").read_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPPO_ARTIFACT_ROOT", artifacts.as_uri())
        done = tools.oppo(home, "restore", "--nothing-since", str(home / "older.tar"))
        assert done.returncode == 0, done.stderr
        assert "MISSING" not in done.stdout
        with tools.running_platform(home) as platform:
            owner = tools.oppo(home, "admin", "token", "admin", "--scope", "admin").stdout.strip()
            platform.http.headers["Authorization"] = f"Bearer {owner}"
            yield platform


@pytest.fixture(scope="module")
def browser(older: Any, tools: Any) -> Iterator[httpx.Client]:
    """A client that is logged in to the pages."""
    link = tools.oppo(older.home, "login-link", "admin").stdout.split()[-1]
    with httpx.Client(base_url=older.base_url, timeout=20, follow_redirects=True) as http:
        http.get(link)
        yield http


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_shown_as_it_was(older: Any, browser: httpx.Client, name: str) -> None:
    number = RUNS[name]
    assert older.run(number)["state"] == THEN["states"][name]
    pages = {tab: browser.get(f"/runs/{number}{tab}") for tab in TABS}
    assert {tab: page.status_code for tab, page in pages.items()} == dict.fromkeys(TABS, 200)
    assert "drafter" in pages["/config"].text or "drafter" not in name
    assert browser.get("/runs/new", params={"from": number}).status_code == 200


def test_the_other_pages_open(browser: httpx.Client) -> None:
    assert {page: browser.get(page).status_code for page in PAGES} == dict.fromkeys(PAGES, 200)


def test_the_api_answers_from_what_was_stored(older: Any) -> None:
    number = RUNS["succeeded"]
    key = "critic/score/mean"
    assert older.get(f"runs/{number}/metrics", keys=key, max_points=100)["series"][key] == THEN["rewards"]
    for part in ("samples", "decisions", "events", "checkpoints"):
        assert older.get(f"runs/{number}/{part}")["items"], part
    assert older.get(f"runs/{number}/timeline")["devices"]
    assert {alert["run"] for alert in older.get("alerts")["items"]} >= {RUNS["failed"]}
    [hook] = older.get("teams/1/webhooks")["items"]
    assert hook["host"] == "192.0.2.1"
    numbers = list(RUNS.values())
    assert len(older.get("compare", runs=",".join(map(str, numbers)))["runs"]) == len(numbers)


@pytest.mark.parametrize("name", ["paused", "paused_with_drafter"])
def test_a_paused_run_goes_on_to_its_end(older: Any, name: str) -> None:
    number = RUNS[name]
    older.http.post(f"runs/{number}/resume").raise_for_status()
    run = older.wait_for_end(number)
    assert run["state"] == "succeeded", run["reason"]
    assert older.steps_of(number) == list(range(1, 61))

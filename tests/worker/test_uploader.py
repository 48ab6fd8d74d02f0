"""The upload ends for every platform response after the engine's end, but not while the engine runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from oppo_contract.wire import Claimed, EventBatch
from worker import uploader
from worker.folders import AttemptFolder, SavedClaim
from worker.outbox import OutboxWriter
from worker.platform_api import PlatformApi, Unreachable
from worker.uploader import MAX_UNKNOWN_ERRORS, Uploader


def not_json() -> None:
    json.loads("<html>")


class Platform:
    """Responds to a batch with `fails`, unless it is None."""

    def __init__(self, fails: Callable[[], None] | None) -> None:
        self.fails = fails
        self.calls, self.lines = 0, 0

    def send_events(self, _attempt_id: int, body: bytes) -> int:
        self.calls += 1
        if self.fails is not None:
            self.fails()
        events = EventBatch.model_validate_json(body).events
        self.lines += len(events)
        return events[-1].seq


@pytest.fixture
def carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Platform], Uploader]:
    """Starts the upload of an attempt with one log line."""
    monkeypatch.setattr(uploader, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(uploader, "MAX_WAIT_S", 0.002)
    folder = AttemptFolder(tmp_path / "17")
    folder.path.mkdir()
    OutboxWriter(folder.supervisor_events).log("stdout", ["one"])
    artifacts = (tmp_path / "runs" / "1").as_uri()
    claimed = Claimed(attempt_token="t", run_id=1, spec={}, device_indices=[0], lease_s=900, artifact_url=artifacts)

    def start(platform: Platform) -> Uploader:
        carries = Uploader(folder, SavedClaim(epoch=1, claimed=claimed), platform, on_started=lambda: None)  # type: ignore[arg-type]
        threading.Thread(target=carries.run, daemon=True).start()
        return carries

    return start


def test_invalid_responses_are_retried_while_the_engine_runs(carry: Any, tools: Any) -> None:
    platform = Platform(not_json)
    carries = carry(platform)
    tools.eventually(lambda: platform.calls > 2 * MAX_UNKNOWN_ERRORS)
    platform.fails = None
    tools.eventually(lambda: platform.lines)
    carries.close()
    assert carries.complete.wait(60)
    assert carries.lost == ""


def test_upload_gives_up_after_the_engines_end(carry: Any) -> None:
    platform = Platform(not_json)
    carries = carry(platform)
    carries.close()
    assert carries.complete.wait(60)
    assert carries.lost.startswith("remaining events cannot be sent to the platform: JSONDecodeError: Expecting value")


def test_long_disk_outage_ends_the_upload(carry: Any, monkeypatch: pytest.MonkeyPatch, tools: Any) -> None:
    def stale() -> None:
        raise OSError("stale file handle")

    platform = Platform(stale)
    carries = carry(platform)
    carries.close()
    tools.eventually(lambda: platform.calls > 3 * MAX_UNKNOWN_ERRORS)
    assert not carries.complete.is_set(), "it may come back"
    monkeypatch.setattr(uploader, "MAX_DISK_OUTAGE_S", 0.0)
    assert carries.complete.wait(60)
    assert carries.lost == "remaining events cannot be sent to the platform: OSError: stale file handle"


def test_unexpected_error_ends_the_thread_with_a_log(carry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform(None)
    monkeypatch.setattr(Uploader, "_update_limit", lambda _self: [][0])
    carries = carry(platform)
    carries.close()
    assert carries.complete.wait(60)
    assert "IndexError" in carries.lost


def wait_a_day() -> None:
    raise Unreachable("503", retry_after_s=86_400.0)


def test_engine_end_interrupts_retry_after(carry: Any, tools: Any) -> None:
    platform = Platform(wait_a_day)
    carries = carry(platform)
    tools.eventually(lambda: platform.calls)
    platform.fails = None
    carries.close()
    assert carries.complete.wait(60)
    assert platform.lines == 1


def test_retry_after_is_limited(carry: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "MAX_RETRY_AFTER_S", 0.001)
    platform = Platform(wait_a_day)
    carries = carry(platform)
    tools.eventually(lambda: platform.calls > 3)
    carries.stop()
    assert carries.complete.wait(60)


def test_undecodable_response_is_unreachable() -> None:
    class Garbled(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"gzip")

        def log_message(self, *_arguments: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Garbled) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        api = PlatformApi(f"http://127.0.0.1:{server.server_port}", "t")
        with closing(api), pytest.raises(Unreachable, match="DecodingError"):
            api.send_events(1, b"{}")

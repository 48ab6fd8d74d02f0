"""A real platform behind a real HTTP server (tests/browser/conftest.py), told of by a worker with stories, and a token for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from oppo_client import Client, Retries
from tests.browser.conftest import Platform, connected, database, platform, spec_data, two_runs

FIXTURES = (connected, database, platform, two_runs)
# The tests' own retries take no longer than they must.
QUICK = Retries(first_s=0.02, longest_s=0.1)
FILES = {"actor/model.safetensors": bytes(range(256)) * 4000, "state.json": b"{}", "empty": b""}


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody's own address, token or file."""
    for name in ("OPPO_URL", "OPPO_TOKEN", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPPO_CONFIG", str(tmp_path / "config.toml"))


@pytest.fixture
def live(platform: Platform) -> Iterator[Platform]:
    """The platform; at the end of the test nothing holds its device."""
    platform.fleet.beat()
    yield platform
    platform.release()


@pytest.fixture(scope="package")
def token_of(platform: Platform) -> Callable[..., str]:
    """Makes tokens: `token_of(scope)`."""

    def make(scope: str = "submit") -> str:
        from oppo_platform.accounts.api_tokens import create_own_token

        return str(create_own_token(platform.user, platform.project.team, "notebook", 1, scope).text)

    return make


@pytest.fixture(scope="package")
def token(token_of: Callable[..., str]) -> str:
    """A token that may submit."""
    return token_of()


@pytest.fixture
def client(live: Platform, token: str) -> Iterator[Client]:
    """The client of mira, who owns the team."""
    with Client(live.web.url, token, retries=QUICK) as c:
        yield c


@pytest.fixture
def spec() -> Callable[..., dict[str, Any]]:
    """Makes specs that the worker's catalogue can run."""

    def make(name: str = "notebook", steps: int = 20, **changes: Any) -> dict[str, Any]:
        return {**spec_data(name, overlap=True, steps=steps), **changes}

    return make


@pytest.fixture
def save() -> Callable[..., Path]:
    """Writes a checkpoint where the platform finds it, and registers it: `save(supervisor, step)`; returns its folder."""

    def make(supervisor: Any, step: int, files: dict[str, bytes] = FILES) -> Path:
        from oppo_contract import wire
        from oppo_platform.runs.attempts import artifact_url

        url = f"{artifact_url(supervisor.claimed.run_id)}/checkpoints/step-{step:08d}"
        folder = Path(unquote(urlsplit(url).path))
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        listed = {name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)} for name, content in files.items()}
        text = json.dumps(listed)
        (folder / "manifest.json").write_text(text)
        body = wire.CheckpointRegistration(
            epoch=supervisor.order.epoch,
            step=step,
            url=url,
            manifest_sha256=hashlib.sha256(text.encode()).hexdigest(),
            bytes=sum(map(len, files.values())),
        )
        supervisor.fleet._post(f"{supervisor.path}/checkpoints", supervisor.claimed.attempt_token, body)
        return folder

    return make

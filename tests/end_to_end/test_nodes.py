"""A run on two nodes, with everything real: two agents on this machine, one platform, torchrun and gloo."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

pytest.importorskip("oppo_core.distributed.process_group", reason="this engine trains on one node")
pytestmark = [pytest.mark.timeout(600), pytest.mark.full]
LIMITS = {"OPPO_NODE_FRESH_S": "20", "OPPO_ORPHAN_GRACE_S": "3", "OPPO_REDISPATCH_S": "5", "OPPO_WARM": "0"}


class TwoNodes:
    """A platform with its own node, and a second one."""

    def __init__(self, platform: Any, second: subprocess.Popen[bytes], tools: Any) -> None:
        self.platform, self.second, self.tools = platform, second, tools

    def spec(self, name: str, steps: int, backend: str = "plain") -> dict[str, Any]:
        """A tiny run on both nodes, one core each."""
        resources = {"nodes": 2, "devices": 2, "cpu_threads": 1}
        return self.tools.tiny_spec(name, steps, resources=resources, training={"backend": backend})

    def engines(self) -> list[psutil.Process]:
        """The engines' main processes: of the platform's own node, and of the second one."""
        found = []
        for root in (self.platform.process.pid, self.second.pid):
            for process in psutil.Process(root).children(recursive=True):
                try:
                    line = process.cmdline()
                except psutil.NoSuchProcess:
                    continue
                if "oppo_core" in line and "torch.distributed.run" not in line and not any("lifeline.py" in w for w in line):
                    found.append(process)
        return found

    def wait_until_free(self) -> None:
        """The head's report ends an attempt; the other node's engine may still be exiting, and its device is not given away."""
        self.tools.eventually(lambda: not self.engines(), "both engines to end")

    def running(self, run_id: int) -> Any:
        """The run once it trains."""
        return self.tools.eventually(
            lambda: run if (run := self.platform.run(run_id))["state"] == "running" else None, "training"
        )


@pytest.fixture(scope="module")
def nodes(home: Path, tmp_path_factory: pytest.TempPathFactory, tools: Any) -> Iterator[TwoNodes]:
    """A platform whose artifacts are on a path that both of its nodes share."""
    shared, second_home = tmp_path_factory.mktemp("shared"), tmp_path_factory.mktemp("second")
    with tools.running_platform(home, OPPO_ARTIFACT_ROOT=shared.as_uri(), **LIMITS) as platform:
        url = platform.base_url
        token = tools.oppo(home, "admin", "join-token").stdout.split()[-1]
        joined = tools.oppo(second_home, "worker", "join", url, token, "--name", "second", "--models-root", str(home / "models"))
        assert joined.returncode == 0, joined.stderr
        with tools.running_worker(second_home, **LIMITS) as second:
            yield TwoNodes(platform, second, tools)


def test_a_run_is_trained_on_two_nodes(nodes: TwoNodes) -> None:
    platform = nodes.platform
    run_id = platform.submit(nodes.spec("on two nodes", 6))
    run = platform.wait_for_end(run_id)
    assert run["state"] == "succeeded", (run["reason"], run["last_log_lines"])
    assert platform.steps_of(run_id) == list(range(1, 7))
    nodes.wait_until_free()


def test_a_sharded_run_is_submitted_and_followed_in_the_browser(nodes: TwoNodes) -> None:
    """FSDP2 over the two nodes: the form takes it, its page shows both nodes, the last step and a checkpoint."""
    sync_api = pytest.importorskip("playwright.sync_api")
    link = nodes.tools.oppo(nodes.platform.home, "login-link", "admin").stdout.split()[-1]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("OPPO_CHROMIUM"), args=["--no-sandbox"])
        page = browser.new_context(base_url=nodes.platform.base_url).new_page()
        page.set_default_timeout(120_000)
        page.goto(urlsplit(link).path)
        page.goto("/runs/new")
        page.click("[data-view=yaml]")
        page.fill("#yaml", json.dumps(nodes.spec("sharded in the browser", 12, "fsdp2")))
        page.click("#send[aria-disabled=false]")
        page.wait_for_url(re.compile(r"/runs/\d+$"))
        run_id = int(page.url.rsplit("/", 1)[1])
        run = nodes.platform.wait_for_end(run_id)
        assert run["state"] == "succeeded", (run["reason"], run["last_log_lines"])
        page.reload()
        sync_api.expect(page.locator("main")).to_contain_text("12 / 12 steps", timeout=30_000)
        sync_api.expect(page.locator("main")).to_contain_text("on 2 nodes: local, second")
        page.goto(f"/runs/{run_id}/checkpoints")
        sync_api.expect(page.locator("table.checkpoints tbody tr")).to_have_count(3, timeout=30_000)
        browser.close()
    assert nodes.platform.steps_of(run_id) == list(range(1, 13))


@pytest.mark.parametrize("backend", ["plain", "fsdp2"])
@pytest.mark.parametrize("victim", [0, -1])
def test_an_engine_that_is_killed_ends_both_and_the_run_resumes(nodes: TwoNodes, victim: int, backend: str) -> None:
    platform = nodes.platform
    run_id = platform.submit(nodes.spec("killed on one node", 40, backend))
    assert nodes.running(run_id)["reason"].startswith("Trains on nodes ")
    platform.wait_for_step(run_id, 7)  # there is a checkpoint of step 5
    engines = nodes.engines()
    assert len(engines) == 2
    engines[victim].kill()
    nodes.tools.eventually(lambda: not any(process.is_running() for process in engines), "both engines to end")
    run = platform.wait_for_end(run_id)
    assert run["state"] == "succeeded", (run["reason"], run["last_log_lines"])
    assert platform.steps_of(run_id) == list(range(1, 41))


def test_a_pause_stops_both_at_the_same_step_and_they_resume(nodes: TwoNodes) -> None:
    platform = nodes.platform
    run_id = platform.submit(nodes.spec("paused on two nodes", 40))
    platform.wait_for_step(run_id, 3)
    assert platform.http.post(f"runs/{run_id}/pause").status_code == 200
    nodes.tools.eventually(lambda: platform.run(run_id)["state"] == "paused", "the pause")
    nodes.wait_until_free()
    done = platform.run(run_id)["step"]
    assert done < 40
    assert platform.http.post(f"runs/{run_id}/resume").status_code == 200
    assert platform.wait_for_end(run_id)["state"] == "succeeded"
    assert platform.steps_of(run_id) == list(range(1, 41))

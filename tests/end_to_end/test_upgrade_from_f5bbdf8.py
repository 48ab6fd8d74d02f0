"""A platform of commit f5bbdf8 is updated while runs train on a worker of that commit, and put back by its backup.

Two checkouts, each with its own processes: `oppo up` and a separate worker of f5bbdf8 (wire version 4); then `oppo up` of this
checkout on the same OPPO_HOME; then the worker of this checkout. The nodes that `oppo up` itself starts are drained.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]
COMMIT, REPOSITORY = "f5bbdf8", Path(__file__).parents[2]
STEPS, SHORT = 12, 6
# The live run trains during the whole update, a minute on a quiet machine.
LIVE_STEPS, LIVE_WITHIN_S = 1000, 600.0
KEYS = "critic/score/mean,objective/kl,timing_s/step"


@pytest.fixture(scope="module")
def older_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of f5bbdf8."""
    git = ["git", "-C", str(REPOSITORY)]
    try:
        known = subprocess.run([*git, "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if known.returncode != 0:
        pytest.skip(f"the repository has no commit {COMMIT}: a shallow clone, or no repository")
    archive = subprocess.run([*git, "archive", COMMIT], capture_output=True, check=True).stdout
    folder = tmp_path_factory.mktemp(COMMIT)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


@dataclass
class Before:
    """What the older platform had and answered."""

    backup: Path
    runs: dict[str, int]
    series: dict[str, Any]


@dataclass
class Upgrade:
    """The updated platform, with the older worker as its only node that takes runs."""

    platform: Any
    before: Before
    worker: subprocess.Popen[bytes]
    worker_home: Path
    root: dict[str, str]


def series(platform: Any, run_id: int) -> dict[str, Any]:
    """Every point of some metrics of a run."""
    return platform.get(f"runs/{run_id}/metrics", keys=KEYS, max_points=20000)["series"]


def drain(platform: Any, tools: Any, name: str, code: Path | None = None) -> None:
    """Give a node no more runs, as an administrator does."""
    [node] = [node for node in platform.get("cluster")["items"] if node["name"] == name]
    link = tools.oppo(platform.home, "login-link", "admin", code=code).stdout.split()[-1]
    with httpx.Client(base_url=platform.base_url, timeout=20, follow_redirects=True) as browser:
        browser.get(link).raise_for_status()
        browser.get("/sharing").raise_for_status()
        headers = {"X-CSRFToken": browser.cookies["oppo_csrf"], "Referer": platform.base_url}
        browser.post(f"/sharing/nodes/{node['id']}/drain", data={"reason": "test"}, headers=headers).raise_for_status()


@contextmanager
def joined_worker(platform: Any, tools: Any, folder: Path, code: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A separate worker, a node named `second`."""
    token = tools.oppo(platform.home, "admin", "join-token", code=code).stdout.split()[-1]
    models = str(platform.home / "models")
    told = tools.oppo(
        folder, "worker", "join", platform.base_url, token, "--name", "second", "--models-root", models, code=code, **more
    )
    assert told.returncode == 0, told.stderr
    with tools.running_worker(folder, code, **more) as worker:
        yield worker


@pytest.fixture(scope="module")
def upgrade(home: Path, tmp_path_factory: pytest.TempPathFactory, tools: Any, older_code: Path) -> Iterator[Upgrade]:
    """Train on the older platform, back it up, stop it while a run trains and another waits, start this one in its place."""
    folder = tmp_path_factory.mktemp("upgrade")
    worker_home, root = folder / "second", {"OPPO_ARTIFACT_ROOT": (folder / "artifacts").as_uri()}
    worker_home.mkdir()
    with ExitStack() as workers:
        with tools.running_platform(home, older_code, **root) as older:
            drain(older, tools, "local", older_code)
            worker = workers.enter_context(joined_worker(older, tools, worker_home, older_code, **root))
            before = train_and_back_up(older, tools, folder / "before.tar", older_code)
        assert worker.poll() is None, "it goes on without its platform"
        with tools.running_platform(home, **root) as platform:
            yield Upgrade(platform, before, worker, worker_home, root)


def train_and_back_up(older: Any, tools: Any, backup: Path, code: Path) -> Before:
    """A run that ends, one that trains and one that waits; the backup while they do."""
    runs = {"ended": older.submit(tools.tiny_spec("ended", STEPS))}
    assert older.wait_for_end(runs["ended"])["state"] == "succeeded"
    runs |= {name: older.submit(tools.tiny_spec(name, steps)) for name, steps in (("live", LIVE_STEPS), ("waiting", STEPS))}
    older.wait_for_step(runs["live"], 6)
    done = tools.oppo(older.home, "backup", "--with-keys", "--with-checkpoints", str(backup), code=code)
    assert done.returncode == 0, done.stderr
    return Before(backup, runs, {name: series(older, runs[name]) for name in ("ended", "live")})


def succeeds(platform: Any, run_id: int, steps: int) -> None:
    """The run ends well in its first attempt on the node `second`, with every step once."""
    run = platform.wait_for_end(run_id)
    assert run["state"] == "succeeded", (run["reason"], run["last_log_lines"])
    assert platform.steps_of(run_id) == list(range(1, steps + 1))
    assert (run["attempt"], run["where"]) == (1, ["second"])


def test_a_run_that_was_live_is_finished_by_its_older_worker(upgrade: Upgrade, tools: Any) -> None:
    platform, run_id = upgrade.platform, upgrade.before.runs["live"]
    run = platform.run(run_id)
    assert run["state"] == "running", "it should last longer than the update"
    tools.eventually(lambda: platform.run(run_id)["state"] != "running", "the end of the live run", LIVE_WITHIN_S)
    succeeds(platform, run_id, LIVE_STEPS)
    for key, then in upgrade.before.series["live"].items():
        now = series(platform, run_id)[key]
        assert then["step"] == now["step"][: len(then["step"])], key
        assert then["y"] == now["y"][: len(then["y"])], key


def test_runs_that_waited_and_new_ones_are_given_to_the_older_worker(upgrade: Upgrade, tools: Any) -> None:
    platform = upgrade.platform
    new = platform.submit(tools.tiny_spec("new", STEPS))
    plain = tools.tiny_spec("new with defaults", SHORT, ppo={"batch_size": 8}, overlap={})
    defaults = platform.submit(plain)
    for run_id, steps in ((upgrade.before.runs["waiting"], STEPS), (new, STEPS), (defaults, SHORT)):
        succeeds(platform, run_id, steps)
    assert upgrade.worker.poll() is None


def test_metrics_of_runs_from_before_are_the_same(upgrade: Upgrade) -> None:
    assert series(upgrade.platform, upgrade.before.runs["ended"]) == upgrade.before.series["ended"]


def test_the_updated_worker_takes_runs(upgrade: Upgrade, tools: Any) -> None:
    upgrade.worker.terminate()
    upgrade.worker.wait(tools.PATIENCE_S)
    with tools.running_worker(upgrade.worker_home, **upgrade.root):
        run_id = upgrade.platform.submit(tools.tiny_spec("after", STEPS, ppo={"batch_size": 8, "tis_floor": 0.5}))
        succeeds(upgrade.platform, run_id, STEPS)


def test_the_backup_brings_the_older_platform_back(
    upgrade: Upgrade, tools: Any, older_code: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with tools.cleared(tmp_path_factory.mktemp("back")) as home:
        done = tools.oppo(home, "restore", str(upgrade.before.backup), code=older_code)
        assert done.returncode == 0, done.stderr
        with tools.running_platform(home, older_code) as older:
            runs = {name: older.run(run_id) for name, run_id in upgrade.before.runs.items()}
            assert {run["name"] for run in runs.values()} == set(upgrade.before.runs)
            assert runs["ended"]["state"] == "succeeded"
            assert series(older, upgrade.before.runs["ended"]) == upgrade.before.series["ended"]

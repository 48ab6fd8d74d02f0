"""Real servers for every test that asks: PostgreSQL and Valkey, once a session, stopped for sure.

They come from the wheels (`oppo_platform.embedded`) and die with this process. `$DATABASE_URL` and `$REDIS_URL` name others.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import hypothesis
import pytest

from tests import scratch

# Where DeepSpeed is installed, whatever saves a model imports it, and it says on stdout that it sees no GPU, unless it is told.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

scratch.begin()
LEFT = pytest.StashKey[list[str]]()
# A number: property tests draw from this seed. Empty: from a fixed one of each test, so that every run tests the same.
SEED = os.environ.get("OPPO_TEST_SEED", "")
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("new", derandomize=False, database=None, deadline=None, print_blob=True)
hypothesis.settings.load_profile("new" if SEED else "fixed")
if SEED:
    hypothesis.core.global_force_seed = int(SEED)  # as --hypothesis-seed does, in every process of pytest-xdist


def pytest_report_header() -> str:
    """How to draw the same again."""
    return f"property tests: OPPO_TEST_SEED={SEED} draws the same again" if SEED else "property tests: a fixed seed"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The session fails when something is left in the temporary folder."""
    left = session.config.stash[LEFT] = [name for made in scratch.MADE for name in made.left()]
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was left, and the seed once more, where somebody looks for it."""
    if left := terminalreporter.config.stash.get(LEFT, []):
        terminalreporter.section("left in the temporary folder", red=True)
        terminalreporter.write_line(", ".join(left))
    if SEED and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"to replay: OPPO_TEST_SEED={SEED} PYTHONHASHSEED={os.environ.get('PYTHONHASHSEED', '')}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Whatever draws without a generator of its own draws the same in every run."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole platforms go first: they take minutes, and everybody waits for what is begun last."""
    items.sort(key=lambda item: not {"end_to_end", "test_runnable.py"} & {*item.path.parts})


@pytest.fixture(scope="session")
def database_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a running PostgreSQL whose user may create databases."""
    given = os.environ.get("DATABASE_URL")
    if given:
        yield given
        return
    from oppo_platform import embedded

    with embedded.postgres(tmp_path_factory.mktemp("postgres"), throwaway=True) as url:
        yield url


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a running Valkey (or Redis)."""
    given = os.environ.get("REDIS_URL")
    if given:
        yield given
        return
    from oppo_platform import embedded

    with embedded.valkey(tmp_path_factory.mktemp("valkey"), throwaway=True) as url:
        yield url


@pytest.fixture(scope="session")
def django_db_modify_db_settings(database_url: str, django_db_modify_db_settings_parallel_suffix: None) -> None:
    """Point Django at that PostgreSQL, before pytest-django creates its test database there."""
    from django.db import connections

    from oppo_platform import environment

    entry = environment.database(database_url)
    connections["default"].settings_dict.update(
        {key: entry[key] for key in ("NAME", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS")}
    )

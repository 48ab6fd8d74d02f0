"""Dockerfile and docker-compose.yml, checked by parsing; no Docker engine is needed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from oppo_cli.main import main

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
OURS = ("migrate", "web", "scheduler", "housekeeper", "worker")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file as data."""
    return YAML(typ="safe", pure=True).load(COMPOSE)


@pytest.fixture(scope="module")
def dockerfile() -> list[list[str]]:
    """Instructions, continued lines joined."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    return [shlex.split(line) for line in text.splitlines() if line.strip() and not line.startswith("#")]


def test_every_service_is_there_with_an_init_a_health_check_and_a_way_back(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"postgres", "redis", *OURS}
    for name, service in services.items():
        assert service["init"] is True, name
        if name != "migrate":
            assert service["healthcheck"]["test"], name
            assert service["restart"] == "unless-stopped", name
    assert services["migrate"]["restart"] == "no"


def test_compose_start_order(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    for name in ("web", "scheduler", "housekeeper"):
        assert services[name]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}
    assert services["worker"]["depends_on"] == {"web": {"condition": "service_healthy"}}


def test_no_secret_has_a_default(compose: dict[str, Any]) -> None:
    for variable in ("POSTGRES_PASSWORD", "REDIS_PASSWORD", "OPPO_SECRET_KEY"):
        uses = re.findall(r"(\$+)\{" + variable + r"([^}]*)\}", COMPOSE)
        assert uses
        assert all(rest.startswith(":?") for _, rest in uses), variable
    for name, service in compose["services"].items():
        for variable, value in (service.get("environment") or {}).items():
            if re.search("PASSWORD|SECRET|TOKEN|URL", variable) and variable != "OPPO_PLATFORM_URL":
                assert "${" in value, f"{name}: {variable} is written out"
        command = " ".join(service.get("command") or [])
        assert not re.search(r"(?<!\$)\$\{?\w*PASSWORD", command), f"{name}: a password on the command line"


def test_a_worker_sees_no_database(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert not {"DATABASE_URL", "REDIS_URL", "OPPO_SECRET_KEY"} & set(services["worker"]["environment"])
    assert not set(services["worker"]["networks"]) & set(services["postgres"]["networks"])
    assert set(services["worker"]["networks"]) & set(services["redis"]["networks"])
    assert set(services["worker"]["networks"]) & set(services["web"]["networks"])


def test_data_outlives_a_container(compose: dict[str, Any]) -> None:
    mounted = {volume.split(":")[0] for service in compose["services"].values() for volume in service.get("volumes", [])}
    assert set(compose["volumes"]) <= mounted
    assert all(not published.startswith("0.0.0.0") for published in compose["services"]["web"]["ports"])


@pytest.mark.parametrize("name", OURS)
def test_commands_are_commands_of_ours(compose: dict[str, Any], name: str, tmp_path: Path) -> None:
    program, *arguments = compose["services"][name]["command"]
    assert program == "oppo"
    arguments = [str(tmp_path) if argument.startswith("/") else argument for argument in arguments]
    command: click.Command = main
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), arguments.pop(0))
        assert found is not None
        command = found
    command.make_context(name, arguments)


@pytest.mark.parametrize("command", [["admin", "create"], ["admin", "join-token"], ["worker", "join"], ["scheduler"]])
def test_commands_named_in_comments_exist(command: list[str]) -> None:
    assert CliRunner().invoke(main, [*command, "--help"]).exit_code == 0


def test_images_are_pinned(compose: dict[str, Any], dockerfile: list[list[str]]) -> None:
    images = [service["image"] for name, service in compose["services"].items() if name not in OURS]
    images += [words[1] for words in dockerfile if words[0] == "FROM" and ":" in words[1]]
    assert images
    assert all(not image.endswith(":latest") and re.search(r":\d", image) for image in images)


def test_the_dockerfile_builds_what_compose_asks_for_and_nobody_is_root(
    compose: dict[str, Any], dockerfile: list[list[str]]
) -> None:
    stages = {words[3]: words[1] for words in dockerfile if words[0] == "FROM"}
    targets = {compose["services"][name]["build"]["target"] for name in OURS}
    assert targets <= set(stages)
    assert all(stages[target] == "base" for target in targets)
    base = dockerfile[next(i for i, words in enumerate(dockerfile) if words[0] == "FROM" and words[3] == "base") :]
    assert next(words[1] for words in base if words[0] == "USER") == "oppo"


def test_copied_files_exist(dockerfile: list[list[str]]) -> None:
    copied = [words[1:-1] for words in dockerfile if words[0] == "COPY" and not words[1].startswith("--")]
    assert copied
    ignored = (ROOT / ".dockerignore").read_text().split()
    for source in [source for sources in copied for source in sources]:
        assert (ROOT / source).exists(), source
        assert source not in ignored

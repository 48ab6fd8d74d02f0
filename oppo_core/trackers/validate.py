"""Checks a run's trackers before it starts: packages, allowed servers, API keys."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import httpx

from oppo_contract.spec import RunSpec
from oppo_core.rewards.allowed_hosts import PORTS, host_port, parse_allowed_hosts
from oppo_core.trackers.config import EXTRA, MODULES, TITLES, WANDB_KEY, WANDB_URL

HOSTS_VARIABLE = "OPPO_TRACKER_HOSTS"


def tracker_errors(spec: RunSpec, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Errors with remedies. Servers are not contacted, because a run does not depend on them."""
    if environment.get("RANK", "0") != "0":
        return
    trackers = spec.logging.trackers
    for name in trackers.enabled:
        if find_spec(MODULES[name]) is None:
            yield (
                f"logging.trackers.{name} needs the package {MODULES[name]}, which this engine's Python does not have;"
                f" install it ({EXTRA}), or leave {TITLES[name]} out"
            )
    if trackers.mlflow is not None:
        yield from _host_errors("logging.trackers.mlflow.uri", trackers.mlflow.uri, environment)
    if trackers.wandb is not None and trackers.wandb.mode == "online":
        yield from _host_errors("logging.trackers.wandb", trackers.wandb.url or WANDB_URL, environment)
        if not environment.get(WANDB_KEY) and not (Path.home() / ".netrc").exists():
            yield (
                f"logging.trackers.wandb with mode online needs {WANDB_KEY} in the engine's environment; on the platform"
                f" `secrets: {{{WANDB_KEY}: secret:NAME}}` puts it there"
            )


def _host_errors(field: str, address: str, environment: Mapping[str, str]) -> Iterator[str]:
    try:
        url = httpx.URL(address)
        allowed = parse_allowed_hosts(HOSTS_VARIABLE, environment)
    except (httpx.InvalidURL, ValueError) as error:
        yield f"{field}: {error}"
        return
    if url.scheme in PORTS and host_port(url) not in allowed:
        value = environment.get(HOSTS_VARIABLE, "").strip()
        yield (
            f"{field} names the server {host_port(url)}, which is not allowed here ({HOSTS_VARIABLE} is {value or 'not set'});"
            f" the machine's operator can allow it with {HOSTS_VARIABLE}={host_port(url)}"
        )

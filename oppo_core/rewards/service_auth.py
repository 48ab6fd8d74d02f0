"""Authorization of reward services: allowed hosts and tokens from the operator's environment, not from the spec.

Any user may submit a spec, and a service receives every answer (see `allowed_hosts`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import httpx

from oppo_contract.spec import HttpReward
from oppo_core.rewards.allowed_hosts import PORTS, host_port, parse_allowed_hosts
from oppo_core.rewards.errors import RewardError

HOSTS_VARIABLE = "OPPO_REWARD_HOSTS"
TOKEN_PREFIX = "OPPO_REWARD_"  # noqa: S105 - the beginning of a variable's name


def allowed_url(given: str, environment: Mapping[str, str] = os.environ) -> httpx.URL:
    """The service's URL, if `OPPO_REWARD_HOSTS` allows its host and port.

    Raises:
        RewardError: the URL is invalid, has a password, or is not allowed; with what to set.
    """
    try:
        url = httpx.URL(given)
    except httpx.InvalidURL as error:
        raise RewardError(f"models.reward.http.url is not a URL: {error}") from None
    if url.scheme not in PORTS or not url.host:
        raise RewardError("models.reward.http.url must be http://host… or https://host…")
    if url.userinfo:
        raise RewardError("models.reward.http.url contains a user or password; use token_variable instead")
    try:
        allowed = parse_allowed_hosts(HOSTS_VARIABLE, environment)
    except ValueError as error:
        raise RewardError(str(error)) from None
    if (place := host_port(url)) not in allowed:
        setting = environment.get(HOSTS_VARIABLE, "").strip() or "not set"
        raise RewardError(
            f"the reward service {place} is not allowed here ({HOSTS_VARIABLE} is {setting}); the worker's operator can allow it"
            f" with {HOSTS_VARIABLE}={place}"
        )
    return url


def bearer_token(http: HttpReward, environment: Mapping[str, str] = os.environ) -> str | None:
    """The service's bearer token. Raises RewardError when the variable may not be read, is not set, or has no valid token."""
    name = http.token_variable
    if name is None:
        return None
    if not name.startswith(TOKEN_PREFIX) or name == HOSTS_VARIABLE:
        raise RewardError(f"models.reward.http.token_variable must start with {TOKEN_PREFIX} and not be {HOSTS_VARIABLE}: {name}")
    token = environment.get(name, "")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        state = "is not set" if not token else "contains characters that are not valid in a token"
        raise RewardError(f"the environment variable {name}, named by models.reward.http.token_variable, {state}")
    return token

"""Where the platform is and who asks: arguments, then `$OPPO_URL` and `$OPPO_TOKEN`, then a file.

The file is `$OPPO_CONFIG`, or `oppo/config.toml` under `$XDG_CONFIG_HOME` or `~/.config`:

    url = "https://oppo.example.org"
    token = "…"

It holds a token, so it must be its owner's alone (mode 0600), and the token goes to no other address than the file's.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from oppo_client.errors import ConfigError

HOW = "Give `Client(url=…, token=…)`, set OPPO_URL and OPPO_TOKEN, or run `oppo login`"


@dataclass(frozen=True, slots=True)
class Config:
    """An address without a slash at its end, and a token, which no representation shows."""

    url: str
    token: str = field(repr=False)


def load_config(url: str | None = None, token: str | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """What to talk to, each part from the first place that has it. Raises `ConfigError`."""
    environ = os.environ if environ is None else environ
    place = config_path(environ)
    given_url = url or environ.get("OPPO_URL", "").strip()
    given_token = token or environ.get("OPPO_TOKEN", "").strip()
    kept = {} if given_url and given_token else _read(place)
    chosen = checked_url(given_url or kept.get("url", ""), place)
    if not given_token and given_url and kept.get("token") and checked_url(kept.get("url", ""), place) != chosen:
        raise ConfigError(f"The token in {place} belongs to {kept.get('url')}, not to {chosen}. {HOW}.")
    return Config(chosen, checked_token(given_token or kept.get("token", ""), place))


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """Where the configuration file is, whether or not it is there."""
    environ = os.environ if environ is None else environ
    if named := environ.get("OPPO_CONFIG", "").strip():
        return Path(named).expanduser()
    base = environ.get("XDG_CONFIG_HOME", "").strip()
    return (Path(base) if base else Path("~/.config").expanduser()) / "oppo" / "config.toml"


def save_config(config: Config, path: Path | None = None) -> Path:
    """Keep address and token, readable for the owner only, in place of what was there. Returns where. Raises `ConfigError`."""
    place = path or config_path()
    # JSON's strings are TOML's, too.
    text = f"url = {json.dumps(config.url)}\ntoken = {json.dumps(config.token)}\n"
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=".config-")  # 0600 from the start
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, place)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{place} cannot be written: {error.strerror}.") from error
    return place


def checked_url(url: str, place: Path) -> str:
    """An http(s) address without what does not belong there. Raises `ConfigError`."""
    if not url:
        raise ConfigError(f"No platform URL is configured ({place} has none). {HOW}.")
    if not _is_address(url):
        raise ConfigError(f"{url!r} is not a platform URL; example: https://oppo.example.org.")
    return url.rstrip("/")


def _is_address(url: str) -> bool:
    try:
        parts, host = urlsplit(url), httpx.URL(url).host
        fine = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except (ValueError, httpx.InvalidURL):  # a port or a name that there cannot be
        return False
    return fine and not (parts.query or parts.fragment or "@" in parts.netloc or " " in url) and url.isprintable()


def checked_token(token: str, place: Path) -> str:
    """A token that fits into a header. Raises `ConfigError`."""
    if not token:
        raise ConfigError(f"No token is configured ({place} has none). {HOW}.")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("The token contains invalid characters. Copy it again.")
    return token


def _read(place: Path) -> dict[str, str]:
    """The file's texts; empty when there is none. Raises `ConfigError` for one that others may read, or that is no TOML."""
    try:
        with place.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if os.name == "posix" and mode & 0o077:
                raise ConfigError(f"{place} is readable by others (mode {mode:04o}), but contains a token: chmod 600 {place}")
            kept = tomllib.loads(file.read().decode())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place} is not TOML: {error}.") from error
    unknown = [name for name in kept if name not in ("url", "token")]
    if unknown or not all(isinstance(value, str) for value in kept.values()):
        raise ConfigError(f'{place} may only contain url = "…" and token = "…"{_which(unknown)}.')
    return {name: str(value) for name, value in kept.items()}


def _which(unknown: list[str]) -> str:
    return f" (it has {', '.join(unknown)})" if unknown else ""

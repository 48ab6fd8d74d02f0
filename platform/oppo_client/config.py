"""URL and token of the platform: from arguments, then `$OPPO_URL` and `$OPPO_TOKEN`, then a file.

The file is `$OPPO_CONFIG`, or `oppo/config.toml` under `$XDG_CONFIG_HOME` or `~/.config`:

    url = "https://oppo.example.org"
    token = "…"

It contains a token: its mode must be 0600, and the token is only sent to the file's URL.
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

HINT = "Give `Client(url=…, token=…)`, set OPPO_URL and OPPO_TOKEN, or run `oppo login`"


@dataclass(frozen=True, slots=True)
class Config:
    """URL without a trailing slash, and the token, which `repr` omits."""

    url: str
    token: str = field(repr=False)


def load_config(url: str | None = None, token: str | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """URL and token, each from the first source that has it. Raises `ConfigError`."""
    environ = os.environ if environ is None else environ
    path = config_path(environ)
    given_url = url or environ.get("OPPO_URL", "").strip()
    given_token = token or environ.get("OPPO_TOKEN", "").strip()
    saved = {} if given_url and given_token else _read(path)
    checked = check_url(given_url or saved.get("url", ""), path)
    if not given_token and given_url and saved.get("token") and check_url(saved.get("url", ""), path) != checked:
        raise ConfigError(f"The token in {path} belongs to {saved.get('url')}, not to {checked}. {HINT}.")
    return Config(checked, check_token(given_token or saved.get("token", ""), path))


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """Path of the configuration file, which need not exist."""
    environ = os.environ if environ is None else environ
    if named := environ.get("OPPO_CONFIG", "").strip():
        return Path(named).expanduser()
    base = environ.get("XDG_CONFIG_HOME", "").strip()
    return (Path(base) if base else Path("~/.config").expanduser()) / "oppo" / "config.toml"


def save_config(config: Config, path: Path | None = None) -> Path:
    """Write URL and token with mode 0600, replacing the file atomically. Returns its path. Raises `ConfigError`."""
    path = path or config_path()
    # JSON strings are valid TOML.
    text = f"url = {json.dumps(config.url)}\ntoken = {json.dumps(config.token)}\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".config-")  # 0600 from the start
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def check_url(url: str, path: Path) -> str:
    """The URL without a trailing slash. Raises `ConfigError` unless it is http(s), without query and credentials."""
    if not url:
        raise ConfigError(f"No platform URL is configured ({path} has none). {HINT}.")
    if not _is_valid_url(url):
        raise ConfigError(f"{url!r} is not a platform URL; example: https://oppo.example.org.")
    return url.rstrip("/")


def _is_valid_url(url: str) -> bool:
    try:
        parts, host = urlsplit(url), httpx.URL(url).host
        valid = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except (ValueError, httpx.InvalidURL):  # an impossible port or host
        return False
    return valid and not (parts.query or parts.fragment or "@" in parts.netloc or " " in url) and url.isprintable()


def check_token(token: str, path: Path) -> str:
    """The token. Raises `ConfigError` if it cannot be an HTTP header."""
    if not token:
        raise ConfigError(f"No token is configured ({path} has none). {HINT}.")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("The token contains invalid characters. Copy it again.")
    return token


def _read(path: Path) -> dict[str, str]:
    """Settings of the file; empty without a file. Raises `ConfigError` if others may read it or it is not valid."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if os.name == "posix" and mode & 0o077:
                raise ConfigError(f"{path} is readable by others (mode {mode:04o}), but contains a token: chmod 600 {path}")
            saved = tomllib.loads(file.read().decode())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error
    unknown = [name for name in saved if name not in ("url", "token")]
    if unknown or not all(isinstance(value, str) for value in saved.values()):
        extra = f" (it has {', '.join(unknown)})" if unknown else ""
        raise ConfigError(f'{path} may only contain url = "…" and token = "…"{extra}.')
    return {name: str(value) for name, value in saved.items()}

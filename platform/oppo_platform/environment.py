"""Reads environment variables: the only module of the platform that does."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parents[1]
DEFAULT_DATABASE_URL = "postgresql://oppo@127.0.0.1:5432/oppo"
URL_FORM = "postgresql://user:password@host:5432/database, with special characters percent-encoded"
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"


def text(name: str, default: str = "") -> str:
    """The variable's value, stripped; the default if unset or empty."""
    return os.environ.get(name, "").strip() or default


def flag(name: str, default: bool = False) -> bool:
    """A boolean: 1/true/yes/on or 0/false/no/off."""
    value = text(name).lower()
    if value in ("", "0", "false", "no", "off"):
        return default if value == "" else False
    if value in ("1", "true", "yes", "on"):
        return True
    raise ImproperlyConfigured(f"{name} is {value!r}; use 1 or 0")


def number(name: str, default: float) -> float:
    """A number."""
    value = text(name)
    try:
        return float(value) if value else default
    except ValueError:
        raise ImproperlyConfigured(f"{name} is {value!r}; it must be a number") from None


def words(name: str) -> list[str]:
    """A comma-separated list."""
    return [word.strip() for word in text(name).split(",") if word.strip()]


def oppo_home() -> Path:
    """The folder of this installation's state, created with mode 0700 if missing."""
    home = Path(text("OPPO_HOME", ".oppo")).expanduser().resolve()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


def secret_key(home: Path) -> str:
    """OPPO_SECRET_KEY, or a generated key in a 0600 file."""
    given = text("OPPO_SECRET_KEY")
    if given:
        return given
    path = home / "secret_key"
    try:
        # O_EXCL: of two processes that start together, one writes and the other reads.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _kept_key(path)
    with os.fdopen(descriptor, "w") as file:
        key = secrets.token_urlsafe(50)
        file.write(key)
    return key


def _kept_key(path: Path) -> str:
    key = path.read_text().strip()
    if len(key) < 50:
        raise ImproperlyConfigured(
            f"{path} has no complete key; deleting it creates a new key and invalidates all sessions and tokens"
        )
    return key


def database(url: str) -> dict[str, Any]:
    """Django's DATABASES entry from a libpq URL; sockets (`?host=/folder`) work as well."""
    try:
        given = conninfo_to_dict(url)
    except ProgrammingError:  # its text has the URL, with the password
        raise ImproperlyConfigured(f"DATABASE_URL cannot be parsed. It has the form {URL_FORM}.") from None
    named = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    options = {key: value for key, value in given.items() if key not in named}
    # Shared by the threads that serve requests, of which there are more; streamed content is read in short-lived ones.
    options["pool"] = {"min_size": 1, "max_size": int(number("OPPO_DB_POOL", 12)), "timeout": 10}
    entry: dict[str, Any] = {django: str(given.get(libpq, "")) for libpq, django in named.items()}
    return {"ENGINE": "django.db.backends.postgresql", "CONN_MAX_AGE": 0, "OPTIONS": options, **entry}


def mail(url: str) -> dict[str, Any]:
    """Django's mail settings from `smtp://user:password@host:587` (STARTTLS) or `smtps://…:465`; empty: no mail.

    `smtp://host:25?plain` uses no TLS, for example for a mail server on the same machine.
    """
    if not url:
        return {"EMAIL_BACKEND": "django.core.mail.backends.dummy.EmailBackend"}
    parts = urlsplit(url)
    if parts.scheme not in ("smtp", "smtps") or not parts.hostname:
        raise ImproperlyConfigured("OPPO_SMTP_URL needs the form smtp://user:password@host:587 or smtps://user:password@host:465")
    encrypted = parts.scheme == "smtps"
    return {
        "EMAIL_BACKEND": "django.core.mail.backends.smtp.EmailBackend",
        "EMAIL_HOST": parts.hostname,
        "EMAIL_PORT": parts.port or (465 if encrypted else 587),
        "EMAIL_HOST_USER": unquote(parts.username or ""),
        "EMAIL_HOST_PASSWORD": unquote(parts.password or ""),
        "EMAIL_USE_SSL": encrypted,
        "EMAIL_USE_TLS": not encrypted and parts.query != "plain",
        "EMAIL_TIMEOUT": 10,
    }


def resources(name: str) -> Path:
    """The folder `templates` or `static`: at the top of a checkout, inside the package in a wheel."""
    packed = PACKAGE / f"_{name}"
    return packed if packed.is_dir() else CHECKOUT / name


def docs_folders() -> tuple[Path, Path]:
    """The built documentation, which may be missing, and its Markdown, which only a checkout has."""
    packed = PACKAGE / "_docs"
    return packed if packed.is_dir() else CHECKOUT / "build" / "site", CHECKOUT / "docs"


def webhook_host(url: str) -> str:
    """The host name in a base URL."""
    host = urlsplit(url).hostname
    if not host:
        raise ImproperlyConfigured(f"OPPO_BASE_URL is {url!r}; it needs a scheme and a host, as in https://oppo.example.org")
    return host

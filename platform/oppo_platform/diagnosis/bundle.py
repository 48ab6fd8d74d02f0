"""What a report of a problem needs, in one archive without secrets: findings, versions, settings and the ends of the logs."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import sys
import tarfile
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from django.conf import settings

from oppo_platform.diagnosis.checks import Finding

SECRET_NAME = re.compile("SECRET|KEY|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)
TOKEN = re.compile(r"\b(oppo[a-z]+_[0-9a-f]{8,})_[0-9a-f]{16,}|\bwhsec_[A-Za-z0-9+/=]{16,}")
URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^@\s/]+@")
HIDDEN = "…"
LOG_LINES = 2000
MIN_SECRET_LENGTH = 6


def write_bundle(file: Path, findings: Iterable[Finding]) -> None:
    """Write a tar.gz with mode 0600; the file must not exist."""
    hide = hider(os.environ)
    members = {
        "findings.json": json.dumps([finding.as_dict() for finding in findings], indent=1),
        "versions.json": json.dumps(versions(), indent=1),
        "settings.json": json.dumps(shown_settings(os.environ), indent=1),
        **{f"logs/{log.name}": _last_lines(log) for log in sorted((settings.OPPO_HOME / "logs").glob("*.log"))},
    }
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in members.items():
            content = hide(text).encode()
            entry = tarfile.TarInfo(f"oppo-doctor/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def versions() -> dict[str, Any]:
    """Python, the system and every installed package."""
    packages = {dist.metadata["Name"]: dist.version for dist in distributions()}
    return {"python": sys.version, "system": platform.platform(), "packages": dict(sorted(packages.items(), key=str))}


def shown_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The platform's environment variables; secrets only as set."""
    ours = {name: value for name, value in environ.items() if name.startswith(("OPPO_", "DATABASE_URL", "REDIS_URL", "DJANGO_"))}
    return {name: HIDDEN if SECRET_NAME.search(name) else _without_password(value) for name, value in sorted(ours.items())}


def hider(environ: Mapping[str, str]) -> Any:
    """A function that removes secrets from a text: our own values, tokens of our forms, and passwords in URLs."""
    own = {value for name, value in environ.items() if SECRET_NAME.search(name)}
    own |= {urlsplit(value).password or "" for value in environ.values() if "://" in value}
    own |= {settings.SECRET_KEY, str(settings.DATABASES["default"].get("PASSWORD", "")), settings.EMAIL_HOST_PASSWORD}
    own |= {key for key in settings.OPPO_SECRETS_KEYS if isinstance(key, str)}
    secrets = sorted((value for value in own if len(value) >= MIN_SECRET_LENGTH), key=len, reverse=True)

    def hide(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, HIDDEN)
        return URL_PASSWORD.sub(rf"\1:{HIDDEN}@", TOKEN.sub(lambda match: f"{match[1] or 'whsec'}_{HIDDEN}", text))

    return hide


def _without_password(value: str) -> str:
    try:
        parts = urlsplit(value)
        if not parts.password:
            return value
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:{HIDDEN}@{host}"))
    except ValueError:
        return HIDDEN


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])

"""Metric names and spec keys as MLflow's servers take them; one that a server refuses would take its whole batch with it."""

from __future__ import annotations

import re
from hashlib import blake2s

LONGEST = 250
# What has to go. Older servers, and those on Windows, also refuse the colon, which our devices have (`busy/cpu:0`).
WIDE = re.compile(r"[^\w/.: -]")
NARROW = re.compile(r"[^A-Za-z0-9_/. -]")
DIGITS = 6


def allowed_name(name: str, refused: re.Pattern[str] = WIDE) -> str:
    """The name itself where a server takes it. Otherwise what is refused becomes `_`, and six digits of the name's digest follow,
    so that two names stay two, in every attempt alike.

    MLflow takes names for paths: they may not begin or end with a slash, nor have parts that are empty, `.` or `..`.
    """
    parts = (part if part.strip(".") else "_" * len(part) for part in refused.sub("_", name).split("/") if part)
    plain = re.sub(r"^\.\.", "__", "/".join(parts)) or "_"
    if plain == name and len(name) <= LONGEST:
        return name
    digest = blake2s(name.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
    return f"{plain[: LONGEST - DIGITS - 1].rstrip('/')}-{digest}"

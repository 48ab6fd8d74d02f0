"""Makes metric names and spec keys valid for MLflow, whose servers reject a whole batch for one invalid name."""

from __future__ import annotations

import re
from hashlib import blake2s

LONGEST = 250
# Refused characters. Older servers, and those on Windows, also refuse the colon (`busy/cpu:0`).
WIDE = re.compile(r"[^\w/.: -]")
NARROW = re.compile(r"[^A-Za-z0-9_/. -]")
DIGITS = 6


def valid_name(name: str, refused: re.Pattern[str] = WIDE) -> str:
    """The name itself if valid; otherwise refused characters become `_`, and six digits of the name's digest are appended, which
    keeps names distinct and equal between attempts.

    MLflow treats names as paths: they may not begin or end with a slash, nor have parts that are empty, `.` or `..`.
    """
    parts = (part if part.strip(".") else "_" * len(part) for part in refused.sub("_", name).split("/") if part)
    plain = re.sub(r"^\.\.", "__", "/".join(parts)) or "_"
    if plain == name and len(name) <= LONGEST:
        return name
    digest = blake2s(name.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
    return f"{plain[: LONGEST - DIGITS - 1].rstrip('/')}-{digest}"

"""Formats sizes in bytes."""

from __future__ import annotations

UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size(count: int) -> str:
    """Bytes as `71.8 GiB`, `310 MiB`, `12 KiB` or `0 bytes`: three significant digits."""
    for unit, one in UNITS:
        if count >= 0.9995 * one:  # rounds to 1,024 of the smaller unit
            return f"{count / one:.3g} {unit}" if count < 999.5 * one else f"{count / one:,.0f} {unit}"
    return f"{count} byte{'' if count == 1 else 's'}"

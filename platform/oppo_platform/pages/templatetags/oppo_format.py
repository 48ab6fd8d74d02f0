"""Number formats of the design. The page scripts have the same rules in static/js/core/format.js."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from django import template
from django.utils.html import escape, format_html, format_html_join
from django.utils.safestring import SafeString

from oppo_contract.byte_sizes import size

register = template.Library()
NONE = "–"
RUN_COLOURS = 8
SPARK_WIDTH, SPARK_HEIGHT, SPARK_EDGE = 84, 22, 2.0


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@register.filter
def fixed(value: Any, digits: int = 2) -> str:
    """`1.2345` as `1.23`; a dash if unknown or not finite."""
    return f"{value:,.{digits}f}".replace("-", "−") if _known(value) else NONE


@register.filter
def percent(share: Any, digits: int = 1) -> str:
    """A share from 0 to 1 as `20.8 %`."""
    return f"{100 * share:.{digits}f} %" if _known(share) else NONE


@register.filter
def figure(value: Any) -> str:
    """Three significant digits: `0.00123`, `1.23`, `123`, `1,234`, `1.0e-6`."""
    if not _known(value):
        return NONE
    size = float(f"{abs(value):.2e}")  # 9.999 is 10.0
    if size == 0:
        return "0"
    if size >= 1e6 or size < 1e-4:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits}e{int(power)}".replace("-", "−", value < 0)
    return fixed(value, max(0, min(6, 2 - math.floor(math.log10(size)))))


def signed(value: float, written: Callable[[float], str]) -> str:
    """A difference with its sign, `+0.12`; empty if it rounds to zero."""
    size = written(abs(value))
    return ("+" if value > 0 else "−") + size if any(digit in size for digit in "123456789") else ""


@register.filter
def duration(seconds: Any) -> str:
    """Seconds as `3.4 s`, `48 s`, `6 m 40 s`, `2 h 13 m` or `3 d 4 h`."""
    if not _known(seconds):
        return NONE
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit_s, big, small in ((86400, "d", "h"), (3600, "h", "m"), (60, "m", "s")):
        if whole >= unit_s:
            part = {"h": 3600, "m": 60, "s": 1}[small]
            return f"{whole // unit_s} {big} {whole % unit_s // part} {small}"
    return f"{whole} s"


def brief(seconds: Any) -> str:
    """A duration within a step: `76 ms`, `1.75 s`."""
    if not _known(seconds):
        return NONE
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{figure(seconds)} s"


@register.filter
def gibibytes(count: Any) -> str:
    """Bytes as `71.8 GiB`, `310 MiB` or `12 KiB`."""
    return size(round(count)) if _known(count) else NONE


@register.filter
def gib(count: Any) -> str:
    """Bytes as a number of GiB, for an input; empty if unknown."""
    return f"{count / 2**30:.6g}" if _known(count) else ""


@register.filter
def moment(when: Any, shown: str = "") -> str:
    """A `<time>` in UTC that the page's script converts to the browser's time zone; `shown="clock"`: hours to seconds."""
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    if when is None:
        return NONE
    utc = when.astimezone(UTC)
    return format_html(
        '<time datetime="{}" data-as="{}">{} UTC</time>', utc.isoformat(), shown, utc.strftime("%Y-%m-%d %H:%M:%S")
    )


@register.filter
def listed(value: Any) -> Any:
    """A list as text, `a, b`; anything else as it is."""
    return ", ".join(map(str, value)) if isinstance(value, list) else value


@register.filter
def ticked(text: str) -> SafeString:
    """A description with backticked words as `<code>`; everything else is escaped."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # a backtick without a partner
        return escape(text)
    return format_html_join("", "{}", ((format_html("<code>{}</code>", p) if i % 2 else p,) for i, p in enumerate(pieces)))


@register.filter
def run_pattern(run_id: int) -> int:
    """One of three patterns, with which runs of one colour differ: plain, stripes, dots; the number of a dash of curves."""
    return (run_id - 1) // RUN_COLOURS % 3


@register.filter
def run_colour(run_id: int) -> int:
    """One of eight colours, a function of the run."""
    return (run_id - 1) % RUN_COLOURS + 1


@register.filter
def metric(latest: dict[str, float], key: str) -> float | None:
    """`latest[key]`, for keys that a template cannot express."""
    return latest.get(key)


@register.filter
def spark_points(values: Sequence[float | None]) -> str:
    """Values as the points of an 84 × 22 SVG polyline; empty for fewer than two finite ones."""
    finite = [value for value in values if _known(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    step = (SPARK_WIDTH - 2 * SPARK_EDGE) / (len(finite) - 1)
    height = SPARK_HEIGHT - 2 * SPARK_EDGE
    return " ".join(f"{SPARK_EDGE + i * step:.1f},{SPARK_EDGE + height * (high - v) / span:.1f}" for i, v in enumerate(finite))


@register.filter
def last_point(points: str) -> list[str]:
    """x and y of the last point of a polyline."""
    return points.rsplit(" ", 1)[-1].split(",")

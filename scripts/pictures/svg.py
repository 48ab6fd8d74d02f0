"""A small canvas for SVG: shapes with roles for colours, light and dark as in static/css/tokens.css."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

TOKENS = Path(__file__).resolve().parents[2] / "static" / "css" / "tokens.css"
FONT = '-apple-system, "Segoe UI", Roboto, "Noto Sans", Ubuntu, "Liberation Sans", Arial, sans-serif'
# Roles of the platform's design, by the class of a shape.
FILLS = {
    "ground": "surface", "lane": "surface-2", "decode": "phase-decode", "actor-prefill": "phase-decode",
    "actor-forward": "phase-decode", "reward-prefill": "phase-reward-prefill", "reference-prefill": "phase-reference-prefill",
    "critic-prefill": "phase-critic-prefill", "update-actor": "phase-update-actor", "update-critic": "phase-update-critic",
    "v0": "run-6", "v1": "run-2", "v2": "run-3", "v3": "run-7",
}  # fmt: skip
INKS = {"ink": "text", "ink-2": "text-2", "on": "on-accent"}
LINES = {"rule": "border-strong", "flow": "text-3"}


class Canvas:
    """Shapes on a ground of `width` × `height`; `write` gives the file's text."""

    def __init__(self, width: float, height: float, title: str, says: str) -> None:
        self.width, self.height, self.title, self.says = width, height, title, says
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, role: str, radius: float = 1) -> None:
        """A rectangle; nothing where it would be narrower than a tenth of a unit."""
        if width >= 0.1:
            self._shapes.append(
                f'<rect class="{role}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"/>'
            )

    def text(
        self, x: float, y: float, words: str, role: str = "ink", size: int = 12, anchor: str = "start", bold: bool = False
    ) -> None:
        """A line of text whose baseline is at y."""
        weight = ' font-weight="600"' if bold else ""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._shapes.append(
            f'<text class="{role}" x="{x:.1f}" y="{y:.1f}" font-size="{size}"{place}{weight}>{escape(words)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, role: str = "rule", arrow: bool = False) -> None:
        """A straight line, with a head at its end if it is an arrow."""
        head = ' marker-end="url(#head)"' if arrow else ""
        self._shapes.append(f'<line class="{role}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{head}/>')

    def path(self, corners: list[tuple[float, float]]) -> None:
        """A line over several corners, with a head at its end."""
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._shapes.append(f'<polyline class="flow" points="{points}" marker-end="url(#head)"/>')

    def write(self) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" role="img"'
            f" aria-labelledby=\"title says\" font-family='{FONT}'>"
        )
        parts = [head, f'<title id="title">{escape(self.title)}</title>', f'<desc id="says">{escape(self.says)}</desc>']
        parts += [f"<style>{style()}</style>", PATTERNS, '<rect class="ground" width="100%" height="100%" rx="8"/>']
        return "\n".join([*parts, *self._shapes, "</svg>"]) + "\n"


PATTERNS = (
    '<defs><pattern id="idle" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="hatch" y2="5"/></pattern>'
    '<marker id="head" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5" markerHeight="5" orient="auto">'
    '<path class="head" d="M0 0 6 3 0 6z"/></marker></defs>'
)


def style() -> str:
    """Light colours, and dark ones for whoever prefers them."""
    light, dark = _colours(0), _colours(1)
    shared = ".idle{fill:url(#idle)} .flow,.rule{fill:none;stroke-width:1} .hatch{stroke-width:2} "
    shared += ".actor-prefill,.actor-forward{opacity:.55}"
    return f"{shared} {light} @media (prefers-color-scheme: dark){{{dark}}}"


def _colours(which: int) -> str:
    roles = dict(re.findall(r"--([\w-]+):\s*light-dark\(([^)]*)\)", TOKENS.read_text(encoding="utf-8")))

    def colour(role: str) -> str:
        return roles[role].split(",")[which].strip()

    rules = [f".{name}{{fill:{colour(role)}}}" for name, role in {**FILLS, **INKS}.items()]
    rules += [f".{name}{{stroke:{colour(role)}}}" for name, role in LINES.items()]
    rules += [f".hatch{{stroke:{colour('axis')}}}", f".head{{fill:{colour('text-3')}}}"]
    return " ".join(rules)

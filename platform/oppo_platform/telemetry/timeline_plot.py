"""A timeline as a Plotly figure, for the page, a notebook or a paper.

Work is horizontal bars in a lane per role, idle time hatched bars over all lanes of its device. Steps are laid end to end,
because a resumed attempt restarts its clock and not every step need be recorded. The figure shows exactly the API's timeline
(`timelines.timeline`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

from oppo_platform.telemetry.palette import HATCH, THEMES, Palette, ThemeName, faded, span_colour
from oppo_platform.telemetry.traces import is_drawable

Json = dict[str, Any]
LANE, GAP, PIXELS = 1.0, 0.4, 30  # heights: of a lane and between devices on the axis, and of a lane on the screen
MOST_ROWS = 9  # of deferred sequences
MOST_LINKS = 160
MOST_STEPS_NAMED = 60


@dataclass(slots=True)
class DeviceLanes:
    """A device's lanes on the y axis, which points down: its top and the middle of each role's lane."""

    device: str
    top: float
    middles: dict[str, float]

    @property
    def height(self) -> float:
        """Height of all its lanes."""
        return LANE * max(1, len(self.middles))


@dataclass(slots=True)
class Bars:
    """Bars of one colour, a list per attribute as Plotly expects them; `base` and `x` in seconds."""

    base: list[float] = field(default_factory=list)
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    width: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def add(self, start_s: float, end_s: float, middle: float, height: float, text: str) -> None:
        """Add a bar from `start_s` to `end_s`."""
        for column, value in ((self.base, start_s), (self.x, end_s - start_s), (self.y, middle), (self.width, height)):
            column.append(value)
        self.text.append(text)

    def trace(self, name: str, marker: Json) -> Json:
        """The Plotly trace."""
        columns = {"base": self.base, "x": self.x, "y": self.y, "width": self.width, "hovertext": self.text}
        drawn = {"type": "bar", "orientation": "h", "name": name, "marker": marker, "hoverinfo": "text", "textposition": "none"}
        return drawn | columns


def timeline_figure(timeline: Json, theme: ThemeName = "light") -> Json:
    """`{"data", "layout"}` for `plotly.graph_objects.Figure` or `Plotly.newPlot`, from a response of `timelines.timeline`.

    A step with unknown times is left out, as in the Chrome trace.
    """
    colours = THEMES[theme]
    steps = [(step, shift) for step, shift in _end_to_end(step for step in timeline["steps"] if is_drawable(step))]
    blocks = _blocks(timeline, [step for step, _ in steps])
    bottom = max((block.top + block.height for block in blocks.values()), default=0.0) + GAP
    rows, sequences = _sequences(steps, bottom, colours)
    data = [*_idle(steps, blocks, colours), *_work(steps, blocks, colours), *_links(steps, blocks, colours), *sequences]
    return {"data": data, "layout": _layout(steps, blocks, bottom, rows, colours)}


def _end_to_end(steps: Iterable[Json]) -> Iterator[tuple[Json, float]]:
    """Each step with the offset of its times in seconds."""
    end = 0.0
    for step in steps:
        start, stop = step["window_s"]
        yield step, end - start
        end += stop - start


def _blocks(timeline: Json, steps: list[Json]) -> dict[str, DeviceLanes]:
    """The devices in their order; a role without an announced lane gets one if it has spans."""
    lanes = {device: dict.fromkeys(role for on, role in timeline["lanes"] if on == device) for device in timeline["devices"]}
    for step in steps:
        for device, role in zip(step["device"], step["role"], strict=True):
            lanes.setdefault(device, {})[role] = None
        for device, *_ in step["idle"]:
            lanes.setdefault(device, {})
    blocks, top = {}, 0.0
    for device, roles in lanes.items():
        blocks[device] = DeviceLanes(device, top, {role: top + LANE * (at + 0.5) for at, role in enumerate(roles)})
        top += blocks[device].height + GAP
    return blocks


def _idle(steps: list[tuple[Json, float]], blocks: dict[str, DeviceLanes], colours: Palette) -> Iterator[Json]:
    causes: dict[str, Bars] = defaultdict(Bars)
    for step, shift in steps:
        for device, cause, start, end in step["idle"]:
            block = blocks[device]
            words = f"<b>idle, waiting for {cause}</b><br>{_seconds(end - start)} on {escape(device)}, {_steps(step)}"
            causes[cause].add(start + shift, end + shift, block.top + block.height / 2, block.height - 0.1, words)
    for cause, bars in sorted(causes.items(), key=lambda item: -sum(item[1].x)):
        colour = colours.idle[cause]
        pattern = {"shape": HATCH[cause], "fgcolor": colour, "bgcolor": faded(colour, 0.12), "size": 7, "solidity": 0.24}
        marker = {"color": faded(colour, 0.12), "line": {"width": 0}, "pattern": pattern | {"fillmode": "overlay"}}
        yield bars.trace(f"idle: {cause}", marker)


def _work(steps: list[tuple[Json, float]], blocks: dict[str, DeviceLanes], colours: Palette) -> Iterator[Json]:
    kinds: dict[str, Bars] = defaultdict(Bars)
    for step, shift in steps:
        columns = (step[name] for name in ("device", "role", "phase", "start_s", "end_s", "chunk", "rows"))
        for device, role, phase, start, end, chunk, rows in zip(*columns, strict=True):
            what = f"chunk {chunk}, {rows} rows, " if chunk else f"{rows} rows, " if rows else ""
            words = f"<b>{phase} ({role})</b><br>{what}{_seconds(end - start)} on {escape(device)}, {_steps(step)}"
            kinds[span_colour(phase, role)].add(start + shift, end + shift, blocks[device].middles[role], 0.8, words)
    for name in colours.phase:
        if name in kinds:
            yield kinds[name].trace(name.replace("-", " "), {"color": colours.phase[name], "line": {"width": 0}})


def _links(steps: list[tuple[Json, float]], blocks: dict[str, DeviceLanes], colours: Palette) -> list[Json]:
    """Lines from the end of a chunk's decoding to the start of each prefill of it; none if they would hide the picture."""
    x: list[float | None] = []
    y: list[float | None] = []
    for step, shift in steps:
        lane = [blocks[device].middles[role] for device, role in zip(step["device"], step["role"], strict=True)]
        last: dict[int, int] = {}
        for at, (phase, chunk) in enumerate(zip(step["phase"], step["chunk"], strict=True)):
            if phase == "decode" and chunk and (chunk not in last or step["end_s"][at] >= step["end_s"][last[chunk]]):
                last[chunk] = at
        for at, (phase, chunk) in enumerate(zip(step["phase"], step["chunk"], strict=True)):
            if phase != "decode" and chunk in last:
                x += [step["end_s"][last[chunk]] + shift, step["start_s"][at] + shift, None]
                y += [lane[last[chunk]], lane[at], None]
    if not 0 < len(x) <= 3 * MOST_LINKS:
        return []
    return [_line("hand-over", x, y, {"color": faded(colours.text_2, 0.45), "width": 1})]


def _sequences(steps: list[tuple[Json, float]], top: float, colours: Palette) -> tuple[int, list[Json]]:
    """Number of rows of deferred sequences below the lanes, and their lines."""
    parts: dict[int, list[Json]] = defaultdict(list)
    for step, shift in steps:
        for part in step["deferred"]:
            moved = {"start_s": part["start_s"] + shift, "end_s": part["end_s"] + shift}
            parts[part["sequence_id"]].append(part | moved)
    free: list[float] = []  # when each row is free again
    young: tuple[list[Any], ...] = ([], [], [])
    old: tuple[list[Any], ...] = ([], [], [])
    for number, pieces in sorted(parts.items(), key=lambda item: (item[1][0]["start_s"], item[0])):
        row = next((at for at, until in enumerate(free) if until <= pieces[0]["start_s"] + 1e-3), len(free))
        if row == MOST_ROWS:
            continue
        free[row : row + 1] = [pieces[-1]["end_s"]]
        for piece in pieces:
            end = f"trained at staleness {piece['age']}" if piece["trained"] else f"deferred at staleness {piece['age']}"
            words = f"<b>sequence {number}</b><br>{piece['tokens']} tokens, {end}"
            xs, ys, texts = old if piece["age"] - (not piece["trained"]) > 0 else young
            xs += [piece["start_s"], piece["end_s"], None]
            ys += [top + 0.5 * (row + 0.5)] * 2 + [None]
            texts += [words, words, ""]
    named = (("deferred: first part", young, "decode"), ("deferred: continuation", old, "update-actor"))
    return len(free), [
        _line(name, xs, ys, {"color": colours.phase[colour], "width": 5}) | {"hovertext": texts, "hoverinfo": "text"}
        for name, (xs, ys, texts), colour in named
        if xs
    ]


def _line(name: str, x: list[Any], y: list[Any], line: Json) -> Json:
    plain = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "connectgaps": False}
    return plain | {"name": name, "x": x, "y": y, "line": line}


def _layout(steps: list[tuple[Json, float]], blocks: dict[str, DeviceLanes], bottom: float, rows: int, colours: Palette) -> Json:
    lanes = [(middle, block.device, role) for block in blocks.values() for role, middle in block.middles.items()]
    lanes += [(block.top + LANE / 2, block.device, "") for block in blocks.values() if not block.middles]
    ticks = [(at, f"{escape(device)} · {role}" if role else escape(device)) for at, device, role in lanes]
    if rows:
        ticks.append((bottom + 0.25 * rows, "deferred"))
    end = bottom + 0.5 * rows
    edges, names = _edges(steps, colours)
    length_s = sum(step["window_s"][1] - step["window_s"][0] for step, _ in steps)
    plain = {"gridcolor": "rgba(0,0,0,0)", "zeroline": False, "linecolor": colours.border, "tickfont": {"size": 11}}
    return {
        "barmode": "overlay", "bargap": 0, "hovermode": "closest", "dragmode": "zoom", "uirevision": "keep",
        "height": round(PIXELS * max(3.0, end)) + 142, "margin": {"l": 120, "r": 16, "t": 32, "b": 110},
        "paper_bgcolor": colours.surface, "plot_bgcolor": colours.surface, "font": {"size": 12, "color": colours.text_2},
        "legend": {"orientation": "h", "y": 0, "yref": "container", "yanchor": "bottom", "x": 0, "font": {"size": 11}},
        "xaxis": plain | {"ticksuffix": " s", "range": [0.0, length_s or 1.0]},
        "yaxis": plain
        | {"range": [end, 0], "fixedrange": True, "tickvals": [at for at, _ in ticks], "ticktext": [name for _, name in ticks]},
        "shapes": edges, "annotations": names,
    }  # fmt: skip


def _edges(steps: list[tuple[Json, float]], colours: Palette) -> tuple[list[Json], list[Json]]:
    """Starts of steps as lines, with their numbers above, as far as there is room."""
    starts = [(step["window_s"][0] + shift, _steps(step)) for step, shift in steps]
    place = {"yref": "paper", "xref": "x"}
    line = {"type": "line", "y0": 0, "y1": 1, "layer": "below", "line": {"color": colours.border, "width": 1}}
    edges = [place | line | {"x0": at, "x1": at} for at, _ in starts] if len(starts) <= 10 * MOST_STEPS_NAMED else []
    every = -(-len(starts) // 8)
    shown = starts[::every] if every else []
    name = {"y": 1, "yanchor": "bottom", "xanchor": "left", "showarrow": False, "font": {"size": 11, "color": colours.text_2}}
    return edges, [place | name | {"x": at, "text": words} for at, words in shown]


def _steps(step: Json) -> str:
    last = step.get("to_step") or step["step"]
    return f"steps {step['step']}–{last}" if last > step["step"] else f"step {step['step']}"


def _seconds(length_s: float) -> str:
    return f"{length_s:.3g} s" if length_s >= 1 else f"{1e3 * length_s:.3g} ms"

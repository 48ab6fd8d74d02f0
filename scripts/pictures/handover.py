"""One step from near: each chunk that the actor has written goes to the scorers, which read it while the next one is written."""

from __future__ import annotations

from typing import Any

from scripts.pictures import told
from scripts.pictures.svg import Canvas

LANES = {(role, "gpu:0" if role == "actor" else "gpu:1"): role for role in ("actor", "reward", "reference", "critic")}
STEP = 2
WIDTH, LEFT, LANE, TOP = 600, 72, 30, 34


def draw() -> str:
    """The drawing."""
    step = told("intra").spans[STEP - 1]
    begin, end = step["window_s"]
    scale = (WIDTH - LEFT - 14) / (end - begin)
    says = "The actor writes chunks 1, 2, 3 and so on; reward model, reference and critic read chunk k while it writes chunk k+1."
    canvas = Canvas(WIDTH, TOP + LANE * len(LANES) + 34, "Hand-overs within a step", says)
    canvas.text(LEFT, 20, "One step: chunks, and who reads them", bold=True)
    rows = {lane: TOP + place * LANE for place, lane in enumerate(LANES)}
    for lane, y in rows.items():
        canvas.text(LEFT - 8, y + 15, LANES[lane], "ink-2", 11, "end")
    spans = [
        (LEFT + (step["start_s"][i] - begin) * scale, LEFT + (step["end_s"][i] - begin) * scale)
        for i in range(len(step["phase"]))
    ]
    for writer, reader in step["flows"]:
        y = rows[step["role"][reader], step["device"][reader]]
        canvas.line(spans[writer][1], rows["actor", "gpu:0"] + 21, spans[reader][0] + 1, y - 1, "flow", arrow=True)
    for i, (left, right) in enumerate(spans):
        _span(canvas, step, i, left, right, rows)
    _axis(canvas, LEFT, WIDTH - 14, TOP + LANE * len(LANES) + 6, end - begin)
    return canvas.write()


def _span(canvas: Canvas, step: dict[str, Any], i: int, left: float, right: float, rows: dict[tuple[str, str], float]) -> None:
    if step["phase"][i] == "data":
        return
    y = rows[step["role"][i], step["device"][i]]
    canvas.box(left, y, right - left - 0.6, 20, step["phase"][i], 2)
    if step["chunk"][i] and right - left > 9:
        canvas.text((left + right) / 2, y + 14, str(step["chunk"][i]), "on", 10, "middle")


def _axis(canvas: Canvas, left: float, right: float, y: float, seconds: float) -> None:
    canvas.line(left, y, right, y)
    canvas.text(left, y + 15, "the step begins", "ink-2", 10)
    canvas.text(right, y + 15, f"{1000 * seconds:.0f} ms: both updates are done", "ink-2", 10, "end")

"""Four schedules of the same work, on one scale: who works when, and who waits."""

from __future__ import annotations

from scripts.pictures import STEPS, Told, told
from scripts.pictures.svg import Canvas

PANELS = {
    "sequential": "Sequential PPO: one stage after the other",
    "intra": "Scorers read while the actor writes",
    "inter": "The longest answers roll over",
    "both": "OPPO: both",
}
DEVICES = {"gpu:0": "actor", "gpu:1": "scorers"}
WIDTH, LEFT, LANE, GAP, PANEL = 600, 62, 18, 4, 96
LEGEND = (
    ("decode", "actor writes"), ("reward-prefill", "reward reads"), ("reference-prefill", "reference reads"),
    ("critic-prefill", "critic reads"), ("update-actor", "actor trains"), ("update-critic", "critic trains"),
    ("idle", "idle"), ("actor-forward", "actor reads"),
)  # fmt: skip


def draw() -> str:
    """The drawing."""
    runs = {name: told(name) for name in PANELS}
    scale = (WIDTH - LEFT - 14) / max(run.seconds for run in runs.values())
    canvas = Canvas(WIDTH, 22 + PANEL * len(PANELS) + 44, "Four schedules of the same PPO steps", _says(runs))
    for number, (name, run) in enumerate(runs.items()):
        _panel(canvas, 22 + PANEL * number, PANELS[name], run, scale)
    _legend(canvas, 22 + PANEL * len(PANELS) + 6)
    return canvas.write()


def _says(runs: dict[str, Told]) -> str:
    return f"{STEPS} steps on two devices. " + "; ".join(f"{PANELS[name]}: {run.seconds:.2f} s" for name, run in runs.items())


def _panel(canvas: Canvas, top: float, title: str, run: Told, scale: float) -> None:
    start = run.spans[0]["window_s"][0]

    def x(time: float) -> float:
        return LEFT + (time - start) * scale

    canvas.text(LEFT, top, title, bold=True)
    rows = {device: top + 10 + place * (LANE + GAP) for place, device in enumerate(DEVICES)}
    for device, y in rows.items():
        canvas.text(LEFT - 8, y + 13, DEVICES[device], "ink-2", 11, "end")
    for step in run.spans:
        for device, _, begin, end in step["idle"]:
            canvas.box(x(begin), rows[device], (end - begin) * scale, LANE, "idle", 0)
        for device, phase, begin, end in zip(step["device"], step["phase"], step["start_s"], step["end_s"], strict=True):
            if phase != "data":
                canvas.box(x(begin), rows[device], (end - begin) * scale, LANE, phase)
        _end_of_step(canvas, x(step["window_s"][0]), x(step["window_s"][1]), top + 6, step["step"])
    words = f"{run.seconds:.2f} s for {run.tokens:,} tokens: {1e6 * run.seconds / run.tokens:.0f} µs each"
    canvas.text(WIDTH - 14, top, words, "ink-2", 11, "end")


def _end_of_step(canvas: Canvas, begin: float, end: float, top: float, step: int) -> None:
    bottom = top + 2 * LANE + GAP + 8
    canvas.line(end, top, end, bottom)
    canvas.text((begin + end) / 2, bottom + 9, f"step {step}", "ink-2", 10, "middle")


def _legend(canvas: Canvas, top: float) -> None:
    for number, (role, words) in enumerate(LEGEND):
        x, y = LEFT + (number % 4) * 130, top + (number // 4) * 17
        canvas.box(x, y, 14, 10, role)
        canvas.text(x + 19, y + 9, words, "ink-2", 11)

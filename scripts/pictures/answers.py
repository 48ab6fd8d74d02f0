"""Every answer of the first steps: in which step which of its tokens were written, and when it was trained."""

from __future__ import annotations

from scripts.pictures import BATCH, EXTRA, STEPS, told
from scripts.pictures.svg import Canvas

WIDTH, LEFT, TOP, ROW = 600, 36, 56, 13
Part = tuple[int, int, int]  # step, tokens before it, tokens after it


def draw() -> str:
    """The drawing."""
    parts, trained = written()
    says = "A row is an answer. Its colour changes where a later version of the policy wrote on; a tick is where it was trained."
    canvas = Canvas(WIDTH, TOP + ROW * len(parts) + 34, "Answers that cross a step", says)
    canvas.text(
        14, 20, f"Answers of {STEPS} steps with B = {BATCH} and Δ = {EXTRA}: tokens, by the version that wrote them", bold=True
    )
    for version in range(STEPS):
        canvas.box(LEFT + 92 * version, 30, 14, 10, f"v{version}")
        canvas.text(LEFT + 92 * version + 19, 39, f"version {version}", "ink-2", 11)
    scale = (WIDTH - LEFT - 120) / max(of[-1][2] for of in parts.values())
    for place, (number, of) in enumerate(sorted(parts.items())):
        _answer(canvas, TOP + ROW * place, number, of, trained.get(number), scale)
    canvas.text(WIDTH - 14, TOP + ROW * len(parts) + 18, "length of the answer, tokens →", "ink-2", 10, "end")
    return canvas.write()


def written() -> tuple[dict[int, list[Part]], dict[int, int]]:
    """By answer: its parts in order, and the step that trained it."""
    parts: dict[int, list[Part]] = {}
    trained: dict[int, int] = {}
    for step in told("both").spans:
        lengths = {number: tokens for number, _, tokens in step["trained"]}
        trained |= dict.fromkeys(lengths, step["step"])
        lengths |= {row["sequence_id"]: row["tokens"] for row in step["deferred"] if not row["trained"]}
        for number, tokens in lengths.items():
            before = parts[number][-1][2] if number in parts else 0
            parts.setdefault(number, []).append((step["step"], before, tokens))
    return parts, trained


def _answer(canvas: Canvas, y: float, number: int, parts: list[Part], trained: int | None, scale: float) -> None:
    canvas.text(LEFT - 6, y + 9, str(number), "ink-2", 9, "end")
    for step, before, after in parts:
        canvas.box(LEFT + before * scale, y, (after - before) * scale, ROW - 3, f"v{step - 1}")
    words = f"✓ trained in step {trained}" if trained else "goes on in the next step"
    canvas.text(LEFT + parts[-1][2] * scale + 6, y + 9, words, "ink-2", 9)

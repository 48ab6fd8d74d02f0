"""One sequence's way through the engine: boxes of the two processes, and what goes from each to the next."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from scripts.pictures.svg import Canvas

WIDTH, HEIGHT = 660, 404


@dataclass(frozen=True)
class Box:
    """A stage: where it stands, and its two lines."""

    x: float
    y: float
    width: float
    name: str
    says: str

    @property
    def middle(self) -> float:
        """Its centre from the left."""
        return self.x + self.width / 2


TALL = 44
ACTOR = {
    "prompts": Box(30, 76, 112, "prompts", "shuffled by seed"),
    "pool": Box(180, 76, 108, "pool", "B+Δ in flight"),
    "decode": Box(326, 76, 118, "decode", "C tokens a chunk"),
    "batch": Box(508, 76, 116, "batch", "the first B"),
    "forward": Box(508, 170, 116, "proximal pass", "log-probs, once"),
    "experience": Box(366, 170, 112, "experience", "KL, rewards, w"),
    "update": Box(170, 170, 118, "actor update", "v becomes v+1"),
}
SCORERS = {
    "reads": Box(266, 306, 112, "reading", "a cache each"),
    "scores": Box(404, 306, 106, "scores", "and values"),
    "critic": Box(532, 306, 104, "critic update", "meanwhile"),
}


def draw() -> str:
    """The drawing."""
    says = (
        "Prompts fill the pool. The actor decodes chunks, which reward, reference and critic read. B answers are trained, the"
        " others are deferred."
    )
    canvas = Canvas(WIDTH, HEIGHT, "One sequence through the engine", says)
    for top, height, words in ((28, 202, "the actor's process"), (270, 116, "the scorers' process: reward, reference, critic")):
        canvas.box(16, top, WIDTH - 32, height, "lane", 6)
        canvas.text(28, top + 18, words, "ink-2", 11)
    for boxes, role in ((ACTOR, "decode"), (SCORERS, "reference-prefill")):
        for box in boxes.values():
            canvas.box(box.x, box.y, box.width, TALL, "ground", 5)
            canvas.box(box.x, box.y, 4, TALL, role, 1)
            canvas.text(box.x + 12, box.y + 19, box.name, size=12, bold=True)
            canvas.text(box.x + 12, box.y + 35, box.says, "ink-2", 10)
    _within(canvas)
    _between(canvas)
    return canvas.write()


def _within(canvas: Canvas) -> None:
    for one, other in itertools.pairwise(("prompts", "pool", "decode", "batch")):
        canvas.line(ACTOR[one].x + ACTOR[one].width, 98, ACTOR[other].x - 2, 98, "flow", arrow=True)
    canvas.line(ACTOR["batch"].middle, 120, ACTOR["forward"].middle, 168, "flow", arrow=True)
    canvas.line(ACTOR["forward"].x, 192, ACTOR["experience"].x + 114, 192, "flow", arrow=True)
    canvas.line(ACTOR["experience"].x, 192, ACTOR["update"].x + 120, 192, "flow", arrow=True)
    canvas.path(
        [(ACTOR["decode"].middle, 76), (ACTOR["decode"].middle, 62), (ACTOR["pool"].middle, 62), (ACTOR["pool"].middle, 74)]
    )
    canvas.text(ACTOR["pool"].middle + 8, 57, "unfinished: deferred, age + 1", "ink-2", 10)
    canvas.path([(ACTOR["update"].middle, 170), (ACTOR["update"].middle, 144), (336, 144), (336, 122)])
    canvas.text(ACTOR["update"].middle + 6, 139, "caches anew", "ink-2", 10)


def _between(canvas: Canvas) -> None:
    canvas.line(352, 120, 352, 304, "flow", arrow=True)
    canvas.text(344, 252, "chunk k, while k+1 is decoded", "ink-2", 10, "end")
    canvas.line(SCORERS["reads"].x + 112, 328, SCORERS["scores"].x - 2, 328, "flow", arrow=True)
    canvas.line(430, 306, 430, 216, "flow", arrow=True)
    canvas.text(436, 252, "collected", "ink-2", 10)
    canvas.path([(466, 214), (466, 240), (SCORERS["critic"].middle, 240), (SCORERS["critic"].middle, 304)])
    canvas.text(SCORERS["critic"].middle + 6, 260, "returns", "ink-2", 10)
    canvas.path([(SCORERS["critic"].middle, 350), (SCORERS["critic"].middle, 368), (300, 368), (300, 352)])
    canvas.text(310, 381, "its cache is read anew", "ink-2", 10)

"""Cost of logging for a training engine: `python -m oppo_bench.telemetry.logging_cost STEPS` prints a line of JSON.

Trains a small OPPO run (hidden 128, 16 answers with a long tail of lengths, four samples per step) and times every call that
writes an event: steps with all their metrics, spans, samples, decisions. The engine only appends to a file; the supervisor
uploads it from another process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oppo_bench.engine.threads import wait_as_the_engine_does

if TYPE_CHECKING:
    from collections.abc import Callable

# An untrained model ends an answer with probability 1/vocab: lengths are geometric.
TINY = {"hidden": 128, "layers": 2, "heads": 4, "context": 400, "vocab": 64}
LEFT_OUT = 2


@dataclass(slots=True)
class Watch:
    """Seconds spent writing events, and the end of every step."""

    written_s: float = 0.0
    of_kind: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: list[tuple[float, float]] = field(default_factory=list)

    def write(self, plain: Callable[..., None], kind: str, *given: Any, **payload: Any) -> None:
        """`Journal.write`, timed. A `step` event ends a step."""
        start = time.perf_counter()
        plain(kind, *given, **payload)
        taken = time.perf_counter() - start
        self.written_s += taken
        self.of_kind[kind].append(taken)
        if kind == "step":
            self.steps.append((time.perf_counter(), self.written_s))


def build_spec(steps: int) -> dict[str, Any]:
    """The run."""
    return {
        "name": "logging cost", "steps": steps, "data": {"prompts": "prompts.jsonl"}, "checkpoints": {"every_steps": 1000},
        "models": {"actor": {"tiny": TINY}, "reward": {"model": {"tiny": TINY}}, "critic": "reward"},
        "ppo": {"batch_size": 16}, "rollout": {"max_new_tokens": 384, "max_prompt_tokens": 16},
        "overlap": {"overcommit": {"initial": 8, "max": 8}, "chunk": {"size": 16}}, "logging": {"samples_per_step": 4},
    }  # fmt: skip


def measure(steps: int) -> dict[str, list[float]]:
    """By figure, one value per step: share of the step, and µs of the call that writes a step with all its metrics."""
    from oppo_contract.spec import load_spec
    from oppo_core.engine.build import assemble
    from oppo_core.reporting.event_log import Journal
    from oppo_core.train import train

    with tempfile.TemporaryDirectory() as name:
        folder, watch = Path(name), Watch()
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(64)))
        engine = assemble(load_spec(build_spec(steps)), [folder], folder, Journal(folder / "events.jsonl"))
        engine.journal.write = partial(watch.write, engine.journal.write)  # type: ignore[method-assign]
        try:
            train(engine, lambda: False)
        finally:
            engine.scorers.close()
            engine.journal.close()
    pairs = list(zip(watch.steps[LEFT_OUT:], watch.steps[LEFT_OUT + 1 :], strict=False))
    return {
        "logging_cost_share": [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairs],
        "logging_us_a_step": [1e6 * (after[1] - before[1]) for before, after in pairs],
        "logging_us_a_call": [1e6 * taken for taken in watch.of_kind["step"][LEFT_OUT:]],
        "logged_step_ms": [1e3 * (after[0] - before[0]) for before, after in pairs],
    }


if __name__ == "__main__":
    wait_as_the_engine_does()  # before torch is imported
    print(json.dumps(measure(int(sys.argv[1]))))

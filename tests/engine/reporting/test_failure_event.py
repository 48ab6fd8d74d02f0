"""However a run fails, its last event says so and why; here with the scorers in the engine's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

from oppo_core import train
from oppo_core.checkpointing import save_restore
from oppo_core.engine import build, preflight
from oppo_core.scoring.scorers import ScorerSet

PLACES: dict[str, tuple[Any, str, int]] = {
    "preflight": (preflight, "preflight", 0),
    "assembling": (build, "read_prompts", 0),
    "starting the scorers": (build, "build_scorers", 0),
    "a step": (train, "decode_batch", 0),
    "saving": (save_restore, "save_supports", 1),
    "the end": (ScorerSet, "close", 1),
}
ERRORS = [RuntimeError("it broke"), SystemExit("it broke"), FileNotFoundError("it broke: bytes \udcff")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", PLACES)
def test_the_last_event_names_the_error(world: Any, tmp_path: Path, place: str, error: BaseException) -> None:
    owner, name, step = PLACES[place]

    def fails(*_: Any, **__: Any) -> NoReturn:
        raise error

    with mock.patch.object(owner, name, fails):
        status, events = world.main(world.tree({"steps": 1, "overlap": {"intra_step": "off"}}), tmp_path)
    last = events[-1]
    assert (status, last.kind, last.outcome) == (1, "finished", "failed")
    assert last.reason.startswith(f"{type(error).__name__}: it broke")
    assert last.step == step


def test_memory_that_runs_out_while_decoding_says_what_to_lower(world: Any, tmp_path: Path) -> None:
    def fails(*_: Any, **__: Any) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with mock.patch.object(train, "decode_batch", fails):
        _, events = world.main(world.tree({"steps": 1, "overlap": {"intra_step": "off"}}), tmp_path)
    assert events[-1].reason.startswith("OutOfMemoryError: CUDA out of memory Remedy: lower ppo.micro_batch_tokens")

"""Which steps of which runs stand side by side when samples are compared. Pure functions.

A column covers the steps of a run after the previous column of that run, up to a chosen step:

    run 3, training, steps 10 and 20:    [1 … 10] [11 … 20]     each shows a prompt's newest response within
    run 3, evaluations at 0, 50, 100,
           steps 60 and 100:             [50] [100]             each shows the newest evaluation within

A prompt is trained at a different step in every run, so a column of one training step would have nothing beside it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

MOST_COLUMNS = 12
MOST_OFFERED = 100
USUAL_STEPS = 4

# `latest`: the run's newest recorded step. `common`: the newest one up to which every run has recorded.
StepWord = Literal["latest", "common"]
Steps = Sequence[int]  # ascending; a range of all training steps


class TooManyColumns(ValueError):
    """More than `MOST_COLUMNS` columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """Samples of a run recorded at the steps `first` to `last`; None where it has none up to `step`, the chosen one."""

    run_id: int
    step: int | None
    first: int | None = None
    last: int | None = None


def choose_columns(recorded: Mapping[int, Steps], requested: Sequence[int | StepWord], *, held_out: bool) -> list[Column]:
    """Columns in the order of the runs, of each run ascending by step.

    Args:
        recorded: the recorded steps of each run.
        requested: steps; by default those of `usual_steps`.
        held_out: whether a column is its newest evaluation, instead of a range of training steps.

    Raises:
        TooManyColumns: no column was made.
    """
    requested = requested or usual_steps(recorded)
    common = min((steps[-1] for steps in recorded.values() if steps), default=None)
    columns = list[Column]()
    for run_id, steps in recorded.items():
        words = {"common": common, "latest": steps[-1] if steps else None}
        chosen = sorted({step for each in requested if (step := words[each] if isinstance(each, str) else each) is not None})
        columns += _columns(run_id, steps, chosen, held_out=held_out) or [Column(run_id, None)]
    if len(columns) > MOST_COLUMNS:
        raise TooManyColumns
    return columns


def usual_steps(recorded: Mapping[int, Steps]) -> list[int | StepWord]:
    """Of one run the first step, some between, and the latest; of several runs the latest common one."""
    if len(recorded) > 1:
        return ["common"]
    return [step for steps in recorded.values() for step in thin_out(steps, USUAL_STEPS)]


def offered_steps(recorded: Mapping[int, Steps]) -> list[int]:
    """At most `MOST_OFFERED` recorded steps of all runs, ascending, evenly spread."""
    return thin_out(sorted({step for steps in recorded.values() for step in thin_out(steps, MOST_OFFERED)}), MOST_OFFERED)


def thin_out(steps: Steps, most: int) -> list[int]:
    """At most that many of the steps, evenly spread, with the first and the last one."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def reward_change(rewards: Sequence[float | None], *, several_runs: bool) -> float | None:
    """Of one run the last known reward minus the first; of several the largest minus the smallest. None below two known ones."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return None
    return max(known) - min(known) if several_runs else known[-1] - known[0]


def _columns(run_id: int, steps: Steps, chosen: Sequence[int], *, held_out: bool) -> list[Column]:
    columns, after = list[Column](), -1
    for step in chosen:
        covered = steps[bisect_right(steps, after) : bisect_right(steps, step)]
        first, last = (covered[-1 if held_out else 0], covered[-1]) if covered else (None, None)
        columns.append(Column(run_id, step, first, last))
        after = step
    return columns

"""Weights & Biases: a run below the run's folder, sent at once or, by `wandb sync`, later."""

from __future__ import annotations

import os
from pathlib import Path

from oppo_core.trackers.memory import Memory
from oppo_core.trackers.order import WANDB_URL, Order, commit
from oppo_core.trackers.records import Answers, Step
from oppo_core.trackers.sink import Say

COLUMNS = ("sequence_id", "prompt", "response", "score", "kl", "length", "age", "ending")
OPENED_WITHIN_S = 20.0


class Wandb:
    """A run with an id that the run's folder keeps. W&B's own process keeps what it is told and sends it, when it is to send it.

    Its steps only go up, so steps that are trained again are left alone.
    """

    rewrites = False

    def __init__(self, order: Order, memory: Memory, _say: Say) -> None:
        import wandb

        self._table = wandb.Table
        settings, online = order.settings, order.settings["mode"] == "online"
        for kind in ("CACHE", "CONFIG", "DATA"):
            os.environ[f"WANDB_{kind}_DIR"] = str(order.folder / f"wandb-{kind.lower()}")
        self._run = wandb.init(
            id=memory.run, resume="allow", project=settings["project"], entity=settings["entity"], mode=settings["mode"],
            name=order.name, dir=Path(order.out), config=order.spec | {"commit": commit()}, allow_val_change=True, force=online,
            settings=wandb.Settings(
                base_url=settings["url"] or WANDB_URL, init_timeout=OPENED_WITHIN_S, console="off", silent=True, disable_git=True,
                save_code=False, disable_job_creation=True, x_disable_stats=True, x_disable_meta=True, x_save_requirements=False,
            ),
        )  # fmt: skip
        told = self._run.starting_step - 1  # what its server knows
        if told > memory.step:
            memory.step, memory.metrics, memory.settled = told, {}, told
        self._before, self._last = memory.step, memory.step

    def tell(self, steps: list[Step]) -> None:
        """A row of its history a step."""
        for step in steps:
            self._run.log(step.metrics, step=step.number)
            self._last = step.number

    def show(self, answers: Answers) -> None:
        """A table, in the row of its step or, where that is written, in the newest one."""
        if answers.step <= self._before and answers.of == "samples":
            return
        rows = [[answers.step, *(row.get(column) for column in COLUMNS)] for row in answers.rows]
        self._run.log({answers.of: self._table(columns=["step", *COLUMNS], data=rows)}, step=max(answers.step, self._last))

    def close(self, outcome: str) -> None:
        """Its state says whether it failed; a pause looks like an end there."""
        self._run.finish(exit_code=1 if outcome == "failed" else 0)


SINK = Wandb

"""Weights & Biases: a run below the run's folder, sent at once or, by `wandb sync`, later."""

from __future__ import annotations

import os
from pathlib import Path

from oppo_core.trackers.config import WANDB_URL, TrackerConfig, commit
from oppo_core.trackers.cursor import Cursor
from oppo_core.trackers.protocol import Samples, Say, Step

COLUMNS = ("sequence_id", "prompt", "response", "score", "kl", "length", "age", "ending")
OPENED_WITHIN_S = 20.0


class Wandb:
    """A run with an id that the run's folder keeps. W&B's own process keeps what it is told and sends it, when it is to send it.

    Its steps only go up, so steps that are trained again are left alone.
    """

    rewrites = False

    def __init__(self, config: TrackerConfig, cursor: Cursor, _say: Say) -> None:
        import wandb

        self._table = wandb.Table
        settings, online = config.settings, config.settings["mode"] == "online"
        for kind in ("CACHE", "CONFIG", "DATA"):
            os.environ[f"WANDB_{kind}_DIR"] = str(config.folder / f"wandb-{kind.lower()}")
        self._run = wandb.init(
            id=cursor.run, resume="allow", project=settings["project"], entity=settings["entity"], mode=settings["mode"],
            name=config.name, dir=Path(config.out), config=config.spec | {"commit": commit()}, allow_val_change=True,
            force=online,
            settings=wandb.Settings(
                base_url=settings["url"] or WANDB_URL, init_timeout=OPENED_WITHIN_S, console="off", silent=True, disable_git=True,
                save_code=False, disable_job_creation=True, x_disable_stats=True, x_disable_meta=True, x_save_requirements=False,
            ),
        )  # fmt: skip
        told = self._run.starting_step - 1  # what its server knows
        if told > cursor.step:
            cursor.step = cursor.settled = told
        self._before, self._last = cursor.step, cursor.step

    def log_steps(self, steps: list[Step]) -> None:
        """A row of its history a step."""
        for step in steps:
            self._run.log(step.metrics, step=step.number)
            self._last = step.number

    def log_samples(self, samples: Samples) -> None:
        """A table, in the row of its step or, where that is written, in the newest one."""
        if samples.step <= self._before and samples.kind == "samples":
            return
        rows = [[samples.step, *(row.get(column) for column in COLUMNS)] for row in samples.rows]
        self._run.log({samples.kind: self._table(columns=["step", *COLUMNS], data=rows)}, step=max(samples.step, self._last))

    def close(self, outcome: str) -> None:
        """Its state says whether it failed; a pause looks like an end there."""
        self._run.finish(exit_code=1 if outcome == "failed" else 0)


TRACKER = Wandb

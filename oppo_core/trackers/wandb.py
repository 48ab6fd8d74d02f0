"""The Weights & Biases tracker: a W&B run stored in the run's folder, sent at once or later by `wandb sync`."""

from __future__ import annotations

import os
from pathlib import Path

from oppo_core.trackers.config import WANDB_URL, TrackerConfig, commit
from oppo_core.trackers.cursor import Cursor
from oppo_core.trackers.protocol import Log, Samples, Step

COLUMNS = ("sequence_id", "prompt", "response", "score", "kl", "length", "age", "ending")
INIT_TIMEOUT_S = 20.0


class Wandb:
    """A W&B run whose id is saved in the run's folder. W&B's own process stores and sends the data.

    W&B's steps only increase, so steps that are trained again are not sent again.
    """

    rewrites = False

    def __init__(self, config: TrackerConfig, cursor: Cursor, _log: Log) -> None:
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
                base_url=settings["url"] or WANDB_URL, init_timeout=INIT_TIMEOUT_S, console="off", silent=True, disable_git=True,
                save_code=False, disable_job_creation=True, x_disable_stats=True, x_disable_meta=True, x_save_requirements=False,
            ),
        )  # fmt: skip
        logged = self._run.starting_step - 1  # on the server
        if logged > cursor.step:
            cursor.step = cursor.settled = logged
        self._before, self._last = cursor.step, cursor.step

    def log_steps(self, steps: list[Step]) -> None:
        for step in steps:
            self._run.log(step.metrics, step=step.number)
            self._last = step.number

    def log_samples(self, samples: Samples) -> None:
        """Log a table at its step, or at the newest step if its own is closed."""
        if samples.step <= self._before and samples.kind == "samples":
            return
        rows = [[samples.step, *(row.get(column) for column in COLUMNS)] for row in samples.rows]
        self._run.log({samples.kind: self._table(columns=["step", *COLUMNS], data=rows)}, step=max(samples.step, self._last))

    def close(self, outcome: str) -> None:
        """End the run; W&B has no state for a pause."""
        self._run.finish(exit_code=1 if outcome == "failed" else 0)


TRACKER = Wandb

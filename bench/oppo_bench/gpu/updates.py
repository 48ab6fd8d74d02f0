"""Cost and saving of the options for an update's memory on the device: recomputation and packing, one actor, one batch."""

from __future__ import annotations

import gc

import torch

from oppo_bench.document import Result
from oppo_bench.engine.memory_options import Update, measured, table, to_results
from oppo_bench.gpu.cases import Cell
from oppo_bench.gpu.racing import Clock, Progress
from oppo_bench.gpu.random_models import ModelSet


def measure(
    cell: Cell, models: ModelSet, device: torch.device, repetitions: int, seconds: float, progress: Progress
) -> list[Result]:
    """Every option in turn, on the size's actor. Figures are named {size}/B{n}/update/{option}/…"""
    progress(f"{cell.case}: updates")
    clock = Clock(seconds)
    update = Update(models.networks["actor"], cell.batch, cell.lengths, cell.load(device.type).size.micro_batch_tokens)
    results = to_results(f"{cell.case}/update", measured(update, repetitions, lambda: clock.left > 0))
    del update
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return results


def lines(cell: Cell, results: list[Result]) -> list[str]:
    """Lines of output."""
    heading = f"{cell.case}, one update of the actor under training.recompute and training.packing:"
    return [heading, *table(f"{cell.case}/update", results)]

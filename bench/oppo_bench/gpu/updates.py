"""Cost and saving of the options for an update's memory on the device: recomputation and packing, one actor, one batch."""

from __future__ import annotations

import gc

import torch

from oppo_bench.document import Result
from oppo_bench.engine.memory_options import Update, measured, results_of, table
from oppo_bench.gpu.cases import Cell
from oppo_bench.gpu.racing import Clock, Tell
from oppo_bench.gpu.random_models import Warehouse


def measure(cell: Cell, house: Warehouse, device: torch.device, repetitions: int, seconds: float, tell: Tell) -> list[Result]:
    """Every option in turn, on the size's actor. Figures are named {size}/B{n}/update/{option}/…"""
    tell(f"{cell.case}: updates")
    clock = Clock(seconds)
    update = Update(house.networks["actor"], cell.batch, cell.lengths, cell.load(device.type).size.micro_batch_tokens)
    results = results_of(f"{cell.case}/update", measured(update, repetitions, lambda: clock.left > 0))
    del update
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return results


def lines(cell: Cell, results: list[Result]) -> list[str]:
    """Lines of output."""
    heading = f"{cell.case}, one update of the actor under training.recompute and training.packing:"
    return [heading, *table(f"{cell.case}/update", results)]

"""Does a second thread pay when one process decodes? `python bench/decode_threads.py [--json FILE]`

Interleaves 1 and all threads, round by round, for several widths and numbers of rows; prints µs a round. The engine's
sequential layout uses the answer: below `DECODE_THREADS_FROM_HIDDEN` it decodes on one thread and trains on all.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median

import torch

from oppo_contract.spec import TinyArchitecture
from oppo_core.models.cache import SlotCache
from oppo_core.models.tiny_transformer import TinyTransformer, init_tiny

ROUNDS, REPETITIONS, COLUMNS = 40, 7, 200
WIDTHS = ((64, 2), (128, 2), (256, 4), (512, 8))
ROWS = (1, 4, 16)


@torch.no_grad()
def round_us(model: TinyTransformer, cache: SlotCache, rows: int) -> float:
    """Microseconds of one decode round over `rows` rows at position `COLUMNS`."""
    tokens, positions = torch.ones(rows, 1, dtype=torch.long), torch.full((rows, 1), COLUMNS)
    start = time.perf_counter()
    for _ in range(ROUNDS):
        window = cache.window(slice(0, rows), positions, COLUMNS + 1)
        model.logits(model.hidden(tokens, positions, window))
    return (time.perf_counter() - start) / ROUNDS * 1e6


def main() -> None:
    """Measure, print a table, and write the bench format when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores, results = os.cpu_count() or 1, []
    print(f"{REPETITIONS} interleaved repetitions of {ROUNDS} rounds at position {COLUMNS}, load {os.getloadavg()[0]:.1f}")
    for hidden, layers in WIDTHS:
        model = init_tiny(TinyArchitecture(hidden=hidden, layers=layers, context=256), "lm", 0)
        cache = SlotCache(model.cache_shape, max(ROWS), COLUMNS + 1, next(model.parameters()))
        for rows in ROWS:
            times: dict[int, list[float]] = {1: [], cores: []}
            for _ in range(REPETITIONS):
                for threads, measured in times.items():
                    torch.set_num_threads(threads)
                    measured.append(round_us(model, cache, rows))
            for threads, measured in times.items():
                name = f"h{hidden}l{layers}/rows{rows}/threads{threads}/us_per_round"
                row = {"name": name, "unit": "us", "median": median(measured), "min": min(measured), "max": max(measured)}
                results.append(row | {"n": len(measured)})
                print(f"{name:44} median {row['median']:8.0f}  min {row['min']:8.0f}  max {row['max']:8.0f}")
    if options.json:
        machine = {"cpus": cores, "load": os.getloadavg()[0]}
        settings = {"rounds": ROUNDS, "position": COLUMNS}
        document = {"bench": "decode_threads", "machine": machine, "settings": settings, "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")

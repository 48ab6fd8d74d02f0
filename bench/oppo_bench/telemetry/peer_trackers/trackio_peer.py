"""trackio's part, in trackio's own environment: `serve PORT`, or `keep PROJECT FILE.npz` with an array `RUN KEY` per series."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import numpy as np

ROWS = 50_000  # per transaction


def keep(project: str, file: str) -> None:
    """Write runs through its storage API, without HTTP."""
    from trackio.sqlite_storage import SQLiteStorage

    runs: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for name, values in np.load(file).items():
        run, _, key = name.partition(" ")
        runs[run][key.replace("|", "/")] = values.tolist()
    for run, columns in runs.items():
        rows: list[dict[str, Any]] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        for start in range(0, len(rows), ROWS):
            part = rows[start : start + ROWS]
            SQLiteStorage.bulk_log(project, run, part, steps=list(range(start + 1, start + 1 + len(part))))


def serve(port: int) -> None:
    """Run its dashboard until it is ended."""
    import trackio

    trackio.show(open_browser=False, block_thread=True, server_port=port)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        keep(sys.argv[2], sys.argv[3])

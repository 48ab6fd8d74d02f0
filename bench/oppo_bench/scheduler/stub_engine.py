"""An engine that takes 50 ms, for `oppo bench scheduler` only: the standard library, no torch.

It leaves a file `start-PID.json` beside its checkpoints: that it ran, and when the attempt's files before it were written.
"""

from __future__ import annotations

import json
import os
import sys
import time

LASTS_S = 0.05


def main() -> int:
    """Write the started and the finished event."""
    began = time.time()
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    seen = {name: os.stat(name).st_mtime for name in ("lock", "claim.json")}
    with open(f"{arguments['--out']}/start-{os.getpid()}.json", "w") as file:
        json.dump({"began": began, **seen}, file)
    started = {"kind": "started", "devices": ["cpu:0"], "lanes": [["cpu:0", "actor"]], "start_step": 0, "total_steps": 1}
    finished = {"kind": "finished", "outcome": "succeeded", "step": 1, "reason": "all steps are done"}
    with open(arguments["--events"], "a") as events:
        for seq, event in enumerate((started, finished), start=1):
            events.write(json.dumps({"producer": "engine", "seq": seq, "time": time.time(), **event}) + "\n")
            events.flush()
            time.sleep(max(0.0, began + LASTS_S - time.time()) if seq == 1 else 0.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())

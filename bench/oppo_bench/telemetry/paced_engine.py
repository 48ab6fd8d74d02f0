"""An engine that only reports steps, one every few tenths of a second, for `oppo bench telemetry`: the standard library, no
torch.

It leaves `steps.json` in its folder: when it wrote each step's event.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time

STEPS, EVERY_S = 60, 0.37  # not a multiple of any polling interval
FIRST_AFTER_S = 6.0  # time for a page to open


def main() -> int:
    """Start, report steps, end."""
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    written: dict[int, float] = {}
    numbers = itertools.count(1)
    with open(arguments["--events"], "a") as events:

        def tell(**event: object) -> float:
            now = time.time()
            events.write(json.dumps({"producer": "engine", "seq": next(numbers), "time": now, **event}) + "\n")
            events.flush()
            return now

        tell(kind="started", devices=["cpu:0"], lanes=[["cpu:0", "actor"]], start_step=0, total_steps=STEPS)
        time.sleep(FIRST_AFTER_S)
        for step in range(1, STEPS + 1):
            shares = {"bubble/cpu:0": 0.2, "busy/cpu:0": 0.8}
            metrics = {"critic/score/mean": math.sin(step / 9), "objective/kl": step / 100, **shares}
            counts = {"elapsed_s": EVERY_S * step, "generated_tokens": 64 * step, "device_seconds": EVERY_S * step}
            written[step] = tell(kind="step", step=step, metrics=metrics, **counts)
            time.sleep(EVERY_S)
        tell(kind="finished", outcome="succeeded", step=STEPS, reason="all steps are done")
    with open(f"{arguments['--out']}/steps.json", "w") as file:
        json.dump(written, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The x axes of a run's charts. All but the step itself are kept as series, so that they thin and zoom as metrics do."""

from __future__ import annotations

from typing import Literal

Axis = Literal["step", "wall", "tokens", "gpu_seconds"]
# No metric's key can begin so (`oppo_contract.events.MetricKey`). Series → the step event's field.
AXIS_KEYS = {"@wall": "elapsed_s", "@tokens": "generated_tokens", "@gpu_seconds": "device_seconds"}

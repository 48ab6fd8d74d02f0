"""Virtual devices: the engine's own loop, pool, controllers, hand-over, report and accounting, on a clock that only models move.

Nothing here decides when something runs: `oppo_core/train.py` and `oppo_core/update/strategies.py` do, as on real machines.
Simulated is what costs time: decoding, reading, training, and how long each answer is (docs/simulation.md).
"""

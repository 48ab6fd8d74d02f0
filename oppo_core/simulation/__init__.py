"""Simulation: the engine's own training loop, pool, controllers and accounting on virtual devices with a virtual clock.

`oppo_core/train.py` and `oppo_core/update/strategies.py` decide when something runs, as on real devices. Simulated are the
costs of decoding, prefill and training, and the length of each answer (docs/simulation.md).
"""

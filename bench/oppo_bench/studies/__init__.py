"""Measurements behind the engine's constants and the figures in docs/performance.md; `python bench/NAME.py` runs one."""

"""Reward, reference and critic: they read answers while these are written, in this process or beside it."""

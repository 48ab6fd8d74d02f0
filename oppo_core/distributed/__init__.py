"""Data-parallel ranks: the collectives that the training loop uses."""

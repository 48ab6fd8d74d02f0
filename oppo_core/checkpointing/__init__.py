"""Checkpoints: atomic folders, saving and resuming, and export."""

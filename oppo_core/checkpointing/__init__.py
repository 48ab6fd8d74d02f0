"""Checkpoints: atomic folders, saving and resuming, resharding, and export."""

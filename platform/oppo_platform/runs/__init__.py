"""Runs, attempts, state transitions and checkpoints."""

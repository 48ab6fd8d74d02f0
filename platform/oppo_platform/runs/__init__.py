"""Projects, runs, attempts, transitions and checkpoints."""

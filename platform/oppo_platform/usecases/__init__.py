"""What needs several apps at once: submitting a run, the heartbeat of a node, the events of a run."""

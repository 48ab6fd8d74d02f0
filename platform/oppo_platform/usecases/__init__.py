"""Operations across several apps: submitting a run, the heartbeat of a node, the events of a run."""

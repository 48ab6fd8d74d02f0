"""The event log and a step's metrics."""

"""What a step reports: metrics, events, and the append-only event log."""

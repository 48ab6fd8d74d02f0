"""`oppo bench telemetry`: ingest, storage, queries and pages; other trackers beside it."""

"""Other experiment trackers, each with its own server and API, for `oppo bench telemetry --peers`."""

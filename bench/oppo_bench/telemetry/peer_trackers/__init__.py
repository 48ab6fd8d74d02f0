"""Other experiment trackers, each with its own server and spoken to by its own API: what `oppo bench telemetry --peers` races."""

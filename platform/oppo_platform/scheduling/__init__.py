"""Assignment of devices to runs, and launch orders to nodes."""

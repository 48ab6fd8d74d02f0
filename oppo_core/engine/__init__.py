"""The run's state, its device layout, assembly from a spec, preflight checks, and step reports."""

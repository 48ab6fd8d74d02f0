"""App configuration of alerts."""

from __future__ import annotations

from django.apps import AppConfig


class AlertsConfig(AppConfig):
    """Registers the hooks of alerts with `runs`."""

    name = "oppo_platform.alerts"

    def ready(self) -> None:
        """Register with `runs`."""
        from oppo_platform.alerts import run_hooks

        run_hooks.register()

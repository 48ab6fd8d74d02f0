"""The app of alerts."""

from __future__ import annotations

from django.apps import AppConfig


class AlertsConfig(AppConfig):
    """Adds to `runs` what it does not know of alerts."""

    name = "oppo_platform.alerts"

    def ready(self) -> None:
        """Register with `runs`."""
        from oppo_platform.alerts import run_hooks

        run_hooks.register()

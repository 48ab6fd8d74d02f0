"""Django configuration of the alerts app."""

from __future__ import annotations

from django.apps import AppConfig


class AlertsConfig(AppConfig):
    """Registers the hooks of alerts in the app `runs`."""

    name = "oppo_platform.alerts"

    def ready(self) -> None:
        from oppo_platform.alerts import run_hooks

        run_hooks.register()

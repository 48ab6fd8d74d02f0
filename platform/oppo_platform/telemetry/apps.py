"""Django's entry for this part."""

from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    """oppo_platform.telemetry."""

    name = "oppo_platform.telemetry"
    default_auto_field = "django.db.models.BigAutoField"

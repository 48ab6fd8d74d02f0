"""Django's entry for this part."""

from django.apps import AppConfig


class AlertsConfig(AppConfig):
    """oppo_platform.alerts."""

    name = "oppo_platform.alerts"
    default_auto_field = "django.db.models.BigAutoField"

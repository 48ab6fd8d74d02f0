"""Django's entry for this part."""

from django.apps import AppConfig


class SchedulingConfig(AppConfig):
    """oppo_platform.scheduling."""

    name = "oppo_platform.scheduling"
    default_auto_field = "django.db.models.BigAutoField"

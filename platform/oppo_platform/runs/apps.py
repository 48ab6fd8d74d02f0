"""Django's entry for this part."""

from django.apps import AppConfig


class RunsConfig(AppConfig):
    """oppo_platform.runs."""

    name = "oppo_platform.runs"
    default_auto_field = "django.db.models.BigAutoField"

"""Django's entry for this part."""

from django.apps import AppConfig


class WebConfig(AppConfig):
    """oppo_platform.web."""

    name = "oppo_platform.web"
    default_auto_field = "django.db.models.BigAutoField"

"""Django's entry for this part."""

from django.apps import AppConfig


class ClusterConfig(AppConfig):
    """oppo_platform.cluster."""

    name = "oppo_platform.cluster"
    default_auto_field = "django.db.models.BigAutoField"

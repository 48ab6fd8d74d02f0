"""Django's entry for this part."""

from django.apps import AppConfig


class StorageConfig(AppConfig):
    """oppo_platform.storage."""

    name = "oppo_platform.storage"
    default_auto_field = "django.db.models.BigAutoField"

"""Django's entry for this part."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """oppo_platform.accounts."""

    name = "oppo_platform.accounts"
    default_auto_field = "django.db.models.BigAutoField"

"""The pages as a Django app, for their template tags."""

from django.apps import AppConfig


class PagesConfig(AppConfig):
    """Views and templates; no models."""

    name = "oppo_platform.pages"

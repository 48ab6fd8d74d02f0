"""Django configuration of the storage app."""

from __future__ import annotations

from django.apps import AppConfig


class StorageConfig(AppConfig):
    """Registers a hook in the app `runs`: the detail of a retried run is recorded anew."""

    name = "oppo_platform.storage"

    def ready(self) -> None:
        from oppo_platform.runs import transitions
        from oppo_platform.storage.retention import on_reopen

        transitions.ON_REOPEN.append(on_reopen)

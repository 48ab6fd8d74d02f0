"""Static files: plotly.js from the installed plotly wheel, and hashed names for browser caching."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from django.contrib.staticfiles.finders import BaseFinder
from django.contrib.staticfiles.storage import HashedFilesMixin
from django.core.exceptions import ImproperlyConfigured
from django.core.files.storage import FileSystemStorage
from whitenoise.compress import Compressor
from whitenoise.storage import CompressedManifestStaticFilesStorage

NAME = "plotly.min.js"
PREFIX = "vendor"


class PlotlyFinder(BaseFinder):
    """Finds `vendor/plotly.min.js` in plotly's package data."""

    def __init__(self, app_names: Any = None, *args: Any, **kwargs: Any) -> None:
        spec = find_spec("plotly")
        if spec is None or spec.origin is None:
            raise ImproperlyConfigured("plotly is not installed; it belongs to the extra `platform`")
        self.folder = Path(spec.origin).parent / "package_data"

    def find(self, path: str, find_all: bool = False, **kwargs: Any) -> str | list[str]:
        """The file's path, or nothing."""
        result = [str(self.folder / NAME)] if path == f"{PREFIX}/{NAME}" else []
        return result if find_all else (result[0] if result else [])

    def list(self, ignore_patterns: Any) -> Iterator[tuple[str, FileSystemStorage]]:
        """The one file, for collectstatic."""
        storage = FileSystemStorage(location=self.folder)
        storage.prefix = PREFIX  # type: ignore[attr-defined]  # collectstatic's protocol
        yield NAME, storage


class HashedStatic(CompressedManifestStaticFilesStorage):
    """Compressed with gzip only: brotli takes ten seconds for plotly.js, too long for the first start."""

    # Imports between modules name hashed files, too. Only in our own folder: plotly.js takes a second in every pass.
    patterns = (*HashedFilesMixin.patterns, ("js/*.js", HashedFilesMixin._js_module_import_aggregation_patterns[1]))
    max_post_process_passes = 12  # a file's hash changes with those that it imports: a pass for each level

    def create_compressor(self, **kwargs: Any) -> Compressor:
        """What whitenoise compresses with."""
        return Compressor(use_brotli=False, **kwargs)

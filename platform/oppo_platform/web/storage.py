"""Static files whose names carry a hash of their content, so that browsers keep them for ever."""

from __future__ import annotations

from typing import Any

from whitenoise.compress import Compressor
from whitenoise.storage import CompressedManifestStaticFilesStorage


class HashedStatic(CompressedManifestStaticFilesStorage):
    """Compressed with gzip only: brotli takes ten seconds over plotly.js, which the first start has not got."""

    def create_compressor(self, **kwargs: Any) -> Compressor:
        """What whitenoise compresses with."""
        return Compressor(use_brotli=False, **kwargs)

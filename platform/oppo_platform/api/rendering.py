"""JSON responses by orjson, which takes a twentieth of the time for the numbers of series."""

from __future__ import annotations

from typing import Any

import orjson
from django.http import HttpRequest
from ninja.renderers import JSONRenderer
from ninja.responses import NinjaJSONEncoder

# Times as Django formats them, with milliseconds and a Z.
OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATETIME
_others = NinjaJSONEncoder().default


class FastJson(JSONRenderer):
    """JSON in UTF-8."""

    def render(self, request: HttpRequest, data: Any, *, response_status: int) -> bytes | str:
        """The response's body. Values that orjson does not support, such as integers above 64 bits, use the standard library."""
        try:
            return orjson.dumps(data, default=_others, option=OPTIONS)
        except orjson.JSONEncodeError:
            return str(super().render(request, data, response_status=response_status))

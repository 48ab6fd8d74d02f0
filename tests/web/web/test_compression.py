"""JSON goes out compressed when the client takes that, and pages and streams never do."""

import gzip
import json

import brotli
import numpy as np
import pytest
from django.http import HttpResponse, StreamingHttpResponse
from hypothesis import given
from hypothesis import strategies as st

from oppo_platform.telemetry.selectors import _rounded
from oppo_platform.web.compression import compressed

BODY = json.dumps({"y": list(range(1000))}).encode()


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [("gzip, deflate, br", "br"), ("gzip;q=1.0", "gzip"), ("br;q=0, gzip", "gzip"), ("", None), ("zstd", None)],
)
def test_by_what_the_client_takes(rf, accepted, encoding):
    response = compressed(rf.get("/", headers={"Accept-Encoding": accepted}), HttpResponse(BODY, content_type="application/json"))
    assert response.headers.get("Content-Encoding") == encoding
    unpack = {"br": brotli.decompress, "gzip": gzip.decompress, None: bytes}[encoding]
    assert unpack(response.content) == BODY
    assert "Accept-Encoding" in response.headers["Vary"]


@pytest.mark.parametrize(
    "response",
    [
        HttpResponse(BODY, content_type="text/html"),
        HttpResponse(b"{}", content_type="application/json"),
        HttpResponse(BODY, content_type="application/json", headers={"Content-Encoding": "br"}),
        StreamingHttpResponse([BODY], content_type="application/json"),
    ],
)
def test_uncompressed_responses(rf, response):
    before = dict(response.headers)
    assert compressed(rf.get("/", headers={"Accept-Encoding": "br"}), response).headers == before


@given(st.lists(st.floats(), min_size=1, max_size=50))
def test_rounding_keeps_six_digits_and_short_texts(values):
    for value, told in zip(values, _rounded(np.array(values)), strict=True):
        if not np.isfinite(value):
            assert told is None
            continue
        assert told == pytest.approx(value, rel=5.1e-6, abs=0)
        if 1e-15 < abs(value) < 1e15:
            assert told == float(f"{told:.6g}"), "no more digits than six"

"""The health check, through the whole stack of middleware."""

import pytest


@pytest.mark.django_db
def test_healthz_answers_without_login_and_with_security_headers(client):
    reply = client.get("/healthz")
    assert reply.status_code == 200
    assert reply.json() == {"ok": True}
    assert "script-src 'self'" in reply.headers["Content-Security-Policy"]
    assert reply.headers["X-Frame-Options"] == "DENY"

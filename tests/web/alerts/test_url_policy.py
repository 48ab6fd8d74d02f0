"""Which addresses a webhook may have: inner ones are refused in every spelling, and nobody can allow link-local ones."""

from __future__ import annotations

import pytest

from oppo_platform.alerts.url_policy import UrlNotAllowed, address_error, parse_target


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "255.255.255.255",
        "224.0.0.1", "::1", "::", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::",
    ],
)  # fmt: skip
def test_private_addresses_in_every_notation_are_blocked(address):
    assert address_error(address, private_allowed=False) != ""


@pytest.mark.parametrize("address", ["169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fe80::1", "224.0.0.1"])
def test_link_local_addresses_are_never_allowed(address):
    assert address_error(address, private_allowed=True) != ""


def test_public_addresses_and_allowed_private_ones():
    for address in ("93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::5db8:d70e"):
        assert address_error(address, private_allowed=False) == ""
    for address in ("127.0.0.1", "10.0.0.1", "fc00::1", "::1"):
        assert address_error(address, private_allowed=True) == ""


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/", "ftp://example.org/", "example.org", "https://", "https://user:pw@example.org/", "https://a b/",
        "https://example.org/#x", "https://example.org:99999/", "https://exämple.org/", "https://[::1",
        "https://e.org/" + "x" * 2000, "file:///etc/passwd", "https://example.org/\r\nX: y",
    ],
)  # fmt: skip
def test_addresses_that_are_refused(url):
    with pytest.raises(UrlNotAllowed):
        parse_target(url, [])

"""A run that trains and a receiver of webhooks, for the tests of alerts."""

from __future__ import annotations

import ssl
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from oppo_platform.alerts.evaluator import evaluate_runs


@pytest.fixture
def training(world, events):
    """(world, run, tell): a run that trains; `tell(step, **metrics)` tells one more step and looks after the runs."""
    worker = world.worker()
    run, attempt_id = world.start(worker)
    seq = iter(range(1, 10_000))
    worker.send_events(attempt_id, [events.started(next(seq))])

    def tell(*steps, look=True, **metrics):
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        batch = [
            events.step(next(seq), step, **{key: value(step) if callable(value) else value for key, value in named.items()})
            for step in steps
        ]
        assert worker.send_events(attempt_id, batch).status_code == 200
        return evaluate_runs() if look else 0

    tell.worker, tell.attempt_id = worker, attempt_id
    return world, run, tell


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(the authority's certificate, a chain with key for `localhost`)."""
    folder, now = tmp_path_factory.mktemp("tls"), datetime.now(UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def named(name):
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def signed(subject, public, extension, *, ca):
        builder = x509.CertificateBuilder().subject_name(named(subject)).issuer_name(named("test authority"))
        builder = builder.public_key(public).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        builder = builder.add_extension(extension, critical=ca)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        return builder.add_extension(authority, critical=False).sign(ca_key, hashes.SHA256())

    ca = signed("test authority", ca_key.public_key(), x509.BasicConstraints(ca=True, path_length=0), ca=True)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    server = signed("localhost", key.public_key(), names, ca=False)
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.pem").write_bytes(server.public_bytes(pem) + private)
    return folder / "ca.pem", folder / "server.pem"


class Receiver:
    """An https server that remembers what came and answers as it is told."""

    def __init__(self, chain):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.came.append((self.path, dict(self.headers), body))
                status = outer.statuses.pop(0) if outer.statuses else 204
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", f"{outer.url}elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments):
                """Silent."""

        self.came, self.statuses = [], []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.url = f"https://localhost:{self.port}/"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def receiver(certificate, monkeypatch, settings):
    """A receiver at `localhost`, which the operator has allowed, under an authority that is trusted."""
    ca, chain = certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    settings.OPPO_WEBHOOK_PRIVATE_HOSTS = ["localhost"]
    settings.OPPO_WEBHOOK_TIMEOUT_S = 5
    found = Receiver(chain)
    yield found
    found.server.shutdown()
    found.server.server_close()

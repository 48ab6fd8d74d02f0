"""A worker for tests: joins, reports devices and a catalogue, claims, and tells stories, all over the real workers' API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx

from oppo_contract import wire
from oppo_contract.events import Event

CATALOGUE = [
    wire.CatalogueEntry(
        id="letters/linked", kind="model", bytes=0, problem="it is a link to /data/linked, outside the models root /models"
    ),
    wire.CatalogueEntry(
        id="letters/actor",
        kind="model",
        bytes=2_400_000,
        architecture="tiny",
        task="causal_lm",
        tokenizer_digest="d1",
        context=768,
        vocab=64,
        weights=600_000,
        layers=4,
        width=256,
        cached=2048,
    ),
    wire.CatalogueEntry(
        id="letters/other-actor",
        kind="model",
        bytes=2_400_000,
        architecture="tiny",
        task="causal_lm",
        tokenizer_digest="d2",
        context=768,
        vocab=64,
        weights=600_000,
        layers=4,
        width=256,
        cached=2048,
    ),
    wire.CatalogueEntry(
        id="letters/reward",
        kind="model",
        bytes=900_000,
        architecture="tiny",
        task="sequence_classification",
        tokenizer_digest="d1",
        context=768,
        vocab=64,
        weights=600_000,
        layers=4,
        width=256,
        cached=2048,
    ),
    wire.CatalogueEntry(id="letters/prompts.jsonl", kind="prompts", bytes=60_000, rows=1024),
]


class Fleet:
    """One node with one device, and the attempts that it holds. `more`: what it offers besides the catalogue."""

    def __init__(self, base_url: str, join_token: str, name: str = "node-1", more: Sequence[wire.CatalogueEntry] = ()) -> None:
        self.more = more
        self.http = httpx.Client(base_url=f"{base_url}/api/worker/v1/", timeout=20)
        joined = self._post("join", join_token, wire.Join(name=name, hostname=f"{name}.test", cpus=2, memory_bytes=4 << 30))
        self.token: str = wire.Joined.model_validate(joined).node_token
        self.attempts: dict[int, int] = {}

    def beat(self) -> list[wire.LaunchOrder]:
        """A node heartbeat; returns the attempts to launch."""
        device = wire.DeviceReport(index=0, kind="cpu", model="Xeon, 2 cores", memory_bytes=4 << 30, busy_share=0.74)
        running = [wire.RunningAttempt(attempt_id=attempt, epoch=epoch) for attempt, epoch in self.attempts.items()]
        body = wire.NodeHeartbeat(devices=[device], attempts=running, catalogue=[*CATALOGUE, *self.more])
        return wire.NodeOrders.model_validate(self._post("heartbeat", self.token, body)).unclaimed

    def launch(self) -> Supervisor | None:
        """Claim what is allocated to this node, if anything is, and move it to running."""
        for order in self.beat():
            reply = self._post(f"attempts/{order.attempt_id}/claim", self.token, wire.Claim(epoch=order.epoch))
            self.attempts[order.attempt_id] = order.epoch
            supervisor = Supervisor(self, order, wire.Claimed.model_validate(reply))
            supervisor.beat()
            return supervisor
        return None

    def _post(self, path: str, token: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        reply = self.http.post(path, content=body.model_dump_json(), headers=headers)
        reply.raise_for_status()
        return reply.json()


class Supervisor:
    """One claimed attempt."""

    def __init__(self, fleet: Fleet, order: wire.LaunchOrder, claimed: wire.Claimed) -> None:
        self.fleet, self.order, self.claimed = fleet, order, claimed
        self.path = f"attempts/{order.attempt_id}"

    def beat(self) -> str | None:
        """An attempt heartbeat; returns the signal that is due."""
        body = wire.AttemptHeartbeat(epoch=self.order.epoch, running=True)
        reply = self.fleet._post(f"{self.path}/heartbeat", self.claimed.attempt_token, body)
        return wire.AttemptOrders.model_validate(reply).signal

    def tell(self, events: list[Event]) -> None:
        """Send a heartbeat and events, in batches that the wire format allows."""
        self.beat()
        for at in range(0, len(events), 200):
            batch = wire.EventBatch(producer="engine", events=events[at : at + 200])
            self.fleet._post(f"{self.path}/events", self.claimed.attempt_token, batch)

    def end(self, outcome: str, reason: str = "", lines: list[str] | None = None) -> None:
        """Report how the engine ended; the device is free."""
        body = wire.Outcome(epoch=self.order.epoch, outcome=outcome, reason=reason, last_log_lines=lines or [])  # type: ignore[arg-type]
        self.fleet._post(f"{self.path}/outcome", self.claimed.attempt_token, body)
        self.fleet.attempts.pop(self.order.attempt_id, None)

    def wait_for_signal(self, wanted: str, within_s: float = 10) -> None:
        """Beat until the platform asks for `wanted`."""
        deadline = time.monotonic() + within_s
        while self.beat() != wanted:
            assert time.monotonic() < deadline, f"no {wanted} within {within_s} s"
            time.sleep(0.05)

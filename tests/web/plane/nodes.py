"""Simulated nodes: the agent of `worker/agent.py`, its supervisors and engines, and the disk on which attempts' files lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from oppo_contract import wire
from tests.web.plane.engines import Engine, Files
from tests.web.plane.network import Serving
from tests.web.plane.supervisors import Supervisor
from worker.agent import RELAUNCH_AFTER_S
from worker.platform_api import RefusedError, Unreachable

if TYPE_CHECKING:
    from tests.web.plane.simulation import ControlPlane

Reply = TypeVar("Reply")


class SimulatedNode:
    """A machine with an agent. Its clock begins anywhere and runs up to a twentieth fast or slow."""

    def __init__(self, plane: ControlPlane, name: str, devices: int) -> None:
        self.plane, self.name, self.device_count = plane, name, devices
        self.rng = plane.rng
        self.rate, self.offset = self.rng.uniform(0.95, 1.05), self.rng.uniform(-1e6, 1e6)
        told = wire.Join(name=name, hostname=name, cpus=2, memory_bytes=1)
        from oppo_platform.cluster.services import join

        joined = join(told)
        self.node_id, self.queue = joined.node_id, joined.queue
        self.files: dict[int, Files] = {}
        self.supervisors: dict[int, Supervisor] = {}
        self.engines: list[Engine] = []
        self.launched_at: dict[int, float] = {}
        self.hidden: set[int] = set()
        self.up = True
        self.catalogue_due = True
        self.cut_until = 0.0
        self.port = 29500
        self._life = 0
        plane.bus.consumers[self.queue] = self.receive
        self.start_agent(0.0)

    def local_now(self) -> float:
        """What the machine's own clock says, seconds."""
        return self.offset + self.rate * self.plane.agenda.now

    def beat_s(self) -> float:
        """Until the next heartbeat: the nominal time, and what a busy machine adds."""
        return wire.HEARTBEAT_S * (1.5 if self.plane.quiet else self.rng.choice((1.0, 1.5, 2.0)))

    @property
    def reachable(self) -> bool:
        """Whether its network is there."""
        return self.plane.agenda.now >= self.cut_until

    def own_address(self) -> wire.Address:
        """Where engines of other nodes would find one of this node; another one each time."""
        self.port += 1
        return wire.Address(host=self.name, port=self.port)

    def call(self, serve: Callable[[], Reply]) -> Reply:
        """A call to the platform. Raises as `Network.call`."""
        return self.plane.network.call(self.reachable, serve)

    def start_agent(self, after_s: float) -> None:
        """A fresh agent's process; an earlier one is gone."""
        self._life += 1
        life = self._life
        self.catalogue_due, self.launched_at = True, {}

        def turn() -> None:
            if life == self._life:
                self.up = True
                self._beat()
                self.plane.agenda.after(self.beat_s(), turn)

        self.plane.agenda.after(after_s, turn)

    def restart_agent(self, away_s: float) -> None:
        """The agent dies and comes back; supervisors and engines go on."""
        self.up = False
        self.start_agent(away_s)

    def restart_machine(self, away_s: float) -> None:
        """Every process is gone at once; the disk stays."""
        for engine in self.engines:
            engine.on_end = lambda: None
            engine.kill()
        for supervisor in list(self.supervisors.values()):
            supervisor.kill()
        self.restart_agent(away_s)

    def receive(self, order: wire.LaunchOrder) -> None:
        """A message of the bus."""
        if self.up and self.reachable:
            self.plane.say(f"{self.name} hears by the bus: launch {order.attempt_id}")
            self.launch(order)

    def launch(self, order: wire.LaunchOrder) -> None:
        """Start a supervisor unless one lives or was started a moment ago."""
        number, now = order.attempt_id, self.local_now()
        if number in self.supervisors or now - self.launched_at.get(number, float("-inf")) < RELAUNCH_AFTER_S:
            return
        self.launched_at[number] = now
        files = self.files.setdefault(number, Files())
        self.supervisors[number] = Supervisor(self, number, order.epoch, files)

    def running(self) -> list[wire.RunningAttempt]:
        """Every attempt with a living supervisor, or with something left that the next one will ship and report."""
        found = {number: supervisor.epoch for number, supervisor in self.supervisors.items()}
        found |= {number: files.claim.epoch for number, files in self.files.items() if files.claim is not None}
        return [wire.RunningAttempt(attempt_id=number, epoch=epoch) for number, epoch in sorted(found.items())]

    def kill_leftover(self, attempt_id: int) -> None:
        """End what an engine whose supervisor was killed may have left."""
        for engine in self.engines:
            if engine.attempt_id == attempt_id:
                engine.kill()

    def _beat(self) -> None:
        report = wire.NodeHeartbeat(
            devices=[
                wire.DeviceReport(index=index, kind="cuda", model="H100", memory_bytes=1)
                for index in range(self.device_count)
                if index not in self.hidden
            ],
            attempts=self.running(),
            catalogue=[wire.CatalogueEntry(id="letters", kind="prompts", bytes=1, rows=10)] if self.catalogue_due else None,
        )
        self.engines = [engine for engine in self.engines if engine.alive]
        try:
            orders = self.call(lambda: Serving.node_heartbeat(self.node_id, report))
        except (Unreachable, RefusedError) as error:
            self.plane.say(f"{self.name} beats in vain: {error}")
        else:
            self._obey(orders)
        self._collect()

    def _obey(self, orders: wire.NodeOrders) -> None:
        start, stop = [o.attempt_id for o in orders.unclaimed], [o.attempt_id for o in orders.stop]
        self.plane.say(f"{self.name} beats, runs {sorted(self.supervisors)}: launch {start}, stop {stop}")
        self.catalogue_due = orders.catalogue_wanted
        for order in orders.stop:
            if order.attempt_id in self.supervisors:
                self.supervisors[order.attempt_id].stop()
        for order in orders.unclaimed:
            self.launch(order)

    def _collect(self) -> None:
        for number, files in list(self.files.items()):
            if files.claim is not None and number not in self.supervisors:
                self.launch(wire.LaunchOrder(attempt_id=number, epoch=files.claim.epoch))

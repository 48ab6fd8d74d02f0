"""Virtual devices that execute work: costs from the description, time on the virtual timeline."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from oppo_contract.events import Phase, Role
from oppo_core.simulation.timeline import Process, Task, Timeline
from oppo_core.trace.recorder import Recorder
from oppo_estimate.devices import ACTOR_GROUP, Devices, Reading, ReadingRole, Training

US = 1e-6


class Machine:
    """The training loop's process, and one process for every other group of devices."""

    def __init__(self, devices: Devices, streams: bool, pass_tokens: int) -> None:
        """`streams`: scorers work concurrently with the actor; `pass_tokens`: most tokens in one pass."""
        self.devices = devices
        self.streams = streams
        self.pass_tokens = pass_tokens
        self.timeline = Timeline(devices.contention, lambda span: self.trace.spans.append(span))
        self.shares = not streams and devices.without_streaming == "share"
        self.own = tuple(devices.names) if self.shares else devices.group(ACTOR_GROUP)
        self.trace = Recorder(self.own, self.timeline)
        self._groups = {} if self.shares else {name: Process(devices.group(name)) for name in devices.groups}
        self.timeline.processes = list(self._groups.values())
        self.devices_used = len(self.own)

    def use(self, count: int) -> None:
        """From now on the loop's process uses its first `count` devices."""
        self.devices_used = count

    def process_of(self, role: ReadingRole) -> Process | None:
        """The process of a scorer; None if it runs in the loop's process."""
        return self._groups.get(self.devices.place[role])

    def work(self, us: float) -> None:
        """Spend time in the loop's process."""
        self.timeline.work(us * US)

    def submit(self, process: Process | None, role: Role, phase: Phase, us: float, chunk: int = 0, rows: int = 0) -> None:
        """Submit work to a process; with None, or without streaming, it completes before this returns."""
        if process is None:
            with self.trace.span(role, phase, chunk, rows):
                self.work(us)
            return
        self.timeline.submit(process, Task(role, phase, us * US, chunk, rows))
        if not self.streams:
            self.wait()

    def wait(self) -> None:
        """Block the loop's process until all submitted work is done."""
        with self.trace.wait("score"):
            self.timeline.wait()

    def decode_us(self, rounds: int, cached: Rows[int], width: int) -> float:
        """`Devices.decode_us` on the devices that the loop's process uses now."""
        return self.devices.decode_us(self.devices_used, rounds, cached, width)

    def forward_us(self, costs: Reading, lengths: Rows[int], process: Process | None = None) -> float:
        """Forward passes over rows of `lengths` tokens."""
        return self._passes_us(costs, costs.token_us, lengths, process)

    def backward_us(self, costs: Training, lengths: Rows[int], process: Process | None = None) -> float:
        """Backward passes over rows of `lengths` tokens."""
        return self._passes_us(costs, costs.backward_us, lengths, process)

    def tokens(self, lengths: Rows[int]) -> int:
        """Tokens of the rows, with padding where the devices pad."""
        return self.devices.tokens(lengths)

    def _passes_us(self, costs: Reading, token_us: float, lengths: Rows[int], process: Process | None) -> float:
        count = self.devices_used if process is None else len(process.devices)
        return self.devices.passes_us(count, costs, token_us, lengths, self.pass_tokens)

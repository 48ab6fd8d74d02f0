"""Virtual devices that execute work: costs from the description, time on the virtual timeline.

A process has one rank of all its devices, between which rows are divided evenly, or with `Devices.ranks` one rank per device,
each with rows of its own. Then a piece of work takes as long as on the slowest rank, and the others wait.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oppo_contract.events import Phase, Role
from oppo_core.simulation.rank_spans import RankRecorder, split_span
from oppo_core.simulation.timeline import Process, Task, Timeline
from oppo_core.trace.recorder import Span
from oppo_estimate.devices import ACTOR_GROUP, Devices, Reading, ReadingRole, Training

US = 1e-6
Loads = list[list[int]]  # tokens of each row of each rank
Times = NDArray[np.float64]  # of each rank, µs


class Machine:
    """The training loop's process, and one process for every other group of devices.

    Attributes:
        world: ranks of the loop's process.
        retained_tokens: most tokens of a rank's forward pass whose graph is retained for the update.
        rank_of: by sequence_id, the rank that has the sequence; empty with one rank.
        batch_ranks: the rank of each row of the batch; likewise.
    """

    def __init__(
        self, devices: Devices, streams: bool, pass_tokens: int, shards_weights: bool = False, retained_tokens: int = 0
    ) -> None:
        """`streams`: scorers work concurrently with the actor; `pass_tokens`: most tokens in one pass of a rank.

        `shards_weights`: every pass of the loop's process gathers its model's weights (FSDP2). Other groups hold whole models.
        """
        self.devices = devices
        self.streams = streams
        self.pass_tokens, self.retained_tokens = pass_tokens, retained_tokens
        self.shards_weights = shards_weights
        self.timeline = Timeline(devices.contention, self._record)
        self.shares = not streams and devices.without_streaming == "share"
        self.own = tuple(devices.names) if self.shares else devices.group(ACTOR_GROUP)
        self.world = devices.ranks_of(len(self.own))
        self.trace = RankRecorder(self.own, self.timeline)
        self._groups = {} if self.shares else {name: Process(devices.group(name)) for name in devices.groups}
        self.timeline.processes = list(self._groups.values())
        self.devices_used = len(self.own)
        self.rank_of: dict[int, int] = {}
        self.batch_ranks: list[int] = []

    def use(self, count: int) -> None:
        """From now on the loop's process uses its first `count` devices."""
        self.devices_used = count

    def process_of(self, role: ReadingRole) -> Process | None:
        """The process of a scorer; None if it runs in the loop's process."""
        return self._groups.get(self.devices.place[role])

    def work(self, us: float | Times) -> None:
        """Spend time in the loop's process: of every rank alike, or as long as the slowest rank."""
        if not isinstance(us, np.ndarray):
            self.timeline.work(us * US)
            return
        start, slowest = self.timeline.now, float(us.max())
        self.timeline.work(slowest * US)
        if self.world > 1 and slowest > 0:
            self.trace.add_waits((1 - us / slowest) * (self.timeline.now - start))

    def submit(self, process: Process | None, role: Role, phase: Phase, us: float | Times, chunk: int = 0, rows: int = 0) -> None:
        """Submit work to a process; with None, or without streaming, it completes before this returns."""
        if process is None:
            with self.trace.span(role, phase, chunk, rows):
                self.work(us)
            return
        slowest = float(np.max(us))
        shares = tuple((us / slowest).tolist()) if isinstance(us, np.ndarray) and len(us) > 1 and slowest > 0 else ()
        self.timeline.submit(process, Task(role, phase, slowest * US, chunk, rows, shares=shares))
        if not self.streams:
            self.wait()

    def wait(self) -> None:
        """Block the loop's process until all submitted work is done."""
        with self.trace.wait("score"):
            self.timeline.wait()

    def loads(self, lengths: Rows[int], ranks: Rows[int], process: Process | None = None) -> Loads:
        """Rows of `lengths` tokens, by rank of a process; `ranks` are those of the actor's group.

        The rows of its rank r go to rank r mod n of another group with n ranks.
        """
        world = self.world if process is None else self.devices.ranks_of(len(process.devices))
        if world == 1:
            return [list(lengths)]
        loads: Loads = [[] for _ in range(world)]
        for length, rank in zip(lengths, ranks, strict=True):
            loads[rank % world].append(length)
        return loads

    def decode_us(self, rounds: int, cached: ArrayLike, widths: ArrayLike, ranks: ArrayLike = 0) -> Times:
        """Decode steps, after each of which the ranks exchange which sequences have finished.

        The same rank is taken as the slowest in all `rounds`, during which no sequence finishes. A rank without rows waits.

        Args:
            cached: cached tokens of each live row.
            widths: rows of each rank when the step began; with padding they are decoded to the end, as long as its longest row.
            ranks: the rank of each live row.
        """
        tokens = np.asarray(cached)
        places = np.broadcast_to(ranks, tokens.shape)
        if self.devices.padded:
            longest = np.zeros(self.world, dtype=np.int64)
            np.maximum.at(longest, places, tokens)
            rows = np.broadcast_to(widths, self.world)
            sums = rows * longest
        else:
            rows, sums = np.bincount(places, minlength=self.world), np.bincount(places, tokens, self.world)
        count = self._devices_of_rank(None)
        computed = [
            self.devices.decode_us(count, rounds, n, total) if n else 0.0
            for n, total in zip(rows.tolist(), sums.tolist(), strict=True)
        ]
        return np.array(computed) + self.devices.collectives_us(self.world, 0, rounds)

    def prefill_us(self, costs: Reading, loads: Loads) -> Times:
        """Forward passes of the decoder, whose copy of the weights is whole."""
        return self._passes_us(costs, costs.token_us, loads, None)

    def forward_us(self, costs: Reading, loads: Loads, process: Process | None = None) -> Times:
        """Forward passes; where the weights are sharded, each gathers them."""
        computed = self._passes_us(costs, costs.token_us, loads, process)
        return self._with_gathering(computed, costs, loads, process, costs.gathered_bytes, costs.units)

    def retained(self, loads: Loads, process: Process | None = None) -> list[int]:
        """Tokens of each rank's forward pass whose graph is retained for the update; none of sharded weights.

        The engine retains whole passes, which may be fewer tokens where a batch needs several.
        """
        most = 0 if process is None and self.shards_weights else self.retained_tokens
        return [min(self.tokens(load), most) for load in loads]

    def update_us(self, costs: Training, loads: Loads, retained: Rows[int], process: Process | None = None) -> Times:
        """Forward passes over the tokens of each rank without a retained graph, and backward passes over all."""
        forward = [[max(0, self.tokens(load) - kept)] for load, kept in zip(loads, retained, strict=True)]
        return self.forward_us(costs, forward, process) + self.backward_us(costs, loads, process)

    def backward_us(self, costs: Training, loads: Loads, process: Process | None = None) -> Times:
        """Backward passes; where the weights are sharded, each gathers them again and reduces the gradients."""
        computed = self._passes_us(costs, costs.backward_us, loads, process)
        moved = costs.gathered_bytes + costs.trained_bytes
        return self._with_gathering(computed, costs, loads, process, moved, 2 * costs.units)

    def reduce_us(self, costs: Training, process: Process | None = None) -> float:
        """All-reduce of the gradients of an optimizer step, after its backward passes. With sharded weights these reduce them."""
        if process is None and self.shards_weights:
            return 0.0
        count = self.world if process is None else len(process.devices)
        return 2 * self.devices.collectives_us(count, costs.trained_bytes)

    def hand_over_us(self) -> float:
        """Gathering the actor's weights into the decoder's copy, in the precision of a pass."""
        costs = self.devices.costs.actor
        return self.devices.collectives_us(self.world, costs.gathered_bytes, costs.units)

    def tokens(self, lengths: Rows[int]) -> int:
        """Tokens of the rows, with padding where the devices pad."""
        return self.devices.tokens(lengths)

    def _devices_of_rank(self, process: Process | None) -> int:
        if self.devices.ranks is not None:
            return 1
        return self.devices_used if process is None else len(process.devices)

    def _passes_us(self, costs: Reading, token_us: float, loads: Loads, process: Process | None) -> Times:
        count = self._devices_of_rank(process)
        return np.array([self.devices.passes_us(count, costs, token_us, lengths, self.pass_tokens) for lengths in loads])

    def _with_gathering(
        self, computed: Times, costs: Reading, loads: Loads, process: Process | None, moved: float, calls: int
    ) -> Times:
        """`computed` with the communication of sharded weights: `moved` bytes in `calls` collectives per pass.

        All ranks make as many passes as the one with the most. The next unit is gathered while one is computed, so that a pass
        of u units takes the longer of computation and communication, plus one unit (1 ÷ u) of the shorter.
        """
        if process is not None or not self.shards_weights:
            return computed
        passes = np.array([self.devices.passes(lengths, self.pass_tokens) for lengths in loads])
        computed = computed + (passes.max() - passes) * costs.pass_us
        slowest = float(computed.max())
        communicated = int(passes.max()) * self.devices.collectives_us(self.world, moved, calls)
        shorter, longer = sorted((slowest, communicated))
        return computed + (longer + shorter / costs.units - slowest)

    def _record(self, span: Span, shares: tuple[float, ...]) -> None:
        """Record a span of another process; `shares`: see `split_span`, empty if all its devices worked alike."""
        spans, waits = split_span(span, shares) if shares else ([span], [])
        self.trace.spans += spans
        self.trace.waits += waits

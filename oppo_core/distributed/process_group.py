"""The ranks of a data-parallel run, a process each: what they add up, agree on and tell each other (docs/algorithm.md, "Several
ranks").

Law: all ranks make the same calls in the same order. Each call ends, within the time that the spec allows, with the same result
on every rank or with a `RankError` that names who is missing. A run of one rank is `ALONE`: the same calls, at no cost.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 * 2**20  # gradients that travel together
LOADED_WITHIN_S = 600.0  # ranks that load models from a slow disk may come so late, whatever the spec allows
SAYS_WHY_WITHIN_S = 5.0  # time for the others to say why they ended
LOST = "lost sight of another rank"
POLL_S = 0.05
# By these torch's errors are known that say that another rank was not reached; it has no class for them.
TRANSPORT = ("gloo/transport", "NCCL", "timed out", "Timed out")


class RankError(RuntimeError):
    """Another rank has ended or is silent, and the message names it; or the ranks were started otherwise than the spec says."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a run find each other. They are numbered node by node, `a_node` on each.

    `hosts`: this process keeps the common store, where torchrun does not.
    """

    address: str
    port: int
    rank: int
    world: int
    hosts: bool
    longest_wait_s: float
    a_node: int = 1


class Ranks(Protocol):
    """All ranks of a run, as one of them sees them."""

    rank: int
    world: int

    @property
    def meeting(self) -> Meeting | None:
        """Where they have met; None for one rank."""

    @property
    def first(self) -> bool:
        """Whether this rank speaks for the run: it alone writes checkpoints and metrics."""

    @property
    def sums_in_turn(self) -> bool:
        """Whether two groups of a process must not `add_up` at the same time: on GPUs they could wait for each other for ever."""

    def part(self, count: int) -> int:
        """This rank's part of `count` things; the parts of all ranks sum to `count`."""

    def home(self, folder: Path) -> Path:
        """Where in a checkpoint's `folder` this rank keeps what is its own."""

    def device(self, name: str) -> str:
        """The run's name for a device of this rank's node."""

    def cores(self, count: int) -> int:
        """This rank's part of the `count` cores of its node, at least one."""

    def total(self, values: Iterable[float]) -> list[float]:
        """Each value summed over the ranks."""

    def add_up(self, tensors: list[Tensor]) -> None:
        """Sum the tensors over the ranks, in place."""

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on some rank."""

    def gather(self, told: bytes) -> list[bytes]:
        """What every rank tells, by rank."""

    def agreed(self, kind: type[Exception]) -> AbstractContextManager[None]:
        """Around some work: an exception of `kind` on one rank is raised on all. The work makes no other call of the ranks."""

    def reaching(self, what: str) -> AbstractContextManager[None]:
        """Around the calls of a group of somebody else's: when it loses a rank, the RankError says which, and why if it told."""

    def store(self, name: str) -> Any:
        """A torch store of all ranks under that name, for a group of somebody else's."""

    def leave(self, reason: str) -> None:
        """Tell the others why this rank will not be heard again."""

    def close(self) -> None:
        """Let go of the others."""


class OneRank:
    """A run of one rank."""

    rank, world, first, sums_in_turn = 0, 1, True, False
    meeting: Meeting | None = None

    def part(self, count: int) -> int:
        """All of it."""
        return count

    def home(self, folder: Path) -> Path:
        """The folder itself."""
        return folder

    def device(self, name: str) -> str:
        """The device's own name."""
        return name

    def cores(self, count: int) -> int:
        """All of them."""
        return count

    def total(self, values: Iterable[float]) -> list[float]:
        """The values."""
        return list(values)

    def add_up(self, tensors: list[Tensor]) -> None:
        """They are the sum."""

    def any(self, flag: bool) -> bool:
        """The flag."""
        return flag

    def gather(self, told: bytes) -> list[bytes]:
        """What was told."""
        return [told]

    def agreed(self, kind: type[Exception]) -> AbstractContextManager[None]:
        """Nothing to agree on."""
        return nullcontext()

    def reaching(self, what: str) -> AbstractContextManager[None]:
        """Nobody to lose."""
        return nullcontext()

    def store(self, name: str) -> Any:
        """In this process."""
        return dist.HashStore()  # type: ignore[attr-defined]

    def leave(self, reason: str) -> None:
        """Nobody is there."""

    def close(self) -> None:
        """Nobody is there."""


ALONE: Ranks = OneRank()


class SeveralRanks:
    """One of several ranks: a process group of its own in torch's gloo, and on GPUs one of NCCL for the gradients.

    What concerns the run is told over gloo, between the nodes' main memories. Groups are made directly, not as torch's global
    one, because a process may be in two: the critic's gradients are summed by whichever process trains it, at its own pace.
    """

    def __init__(self, meeting: Meeting, name: str, device: torch.device) -> None:
        """Meet the other ranks as group `name`; all ranks must come.

        Raises:
            RankError: some did not come in time.
        """
        self.meeting, self.name = meeting, name
        self.rank, self.world = meeting.rank, meeting.world
        self._wait = timedelta(seconds=meeting.longest_wait_s)
        coming = timedelta(seconds=max(meeting.longest_wait_s, LOADED_WITHIN_S))
        self._store = _common_store(meeting, coming)
        try:
            self._store.set(f"here/{name}/{self.rank}", "")
            self._store.wait([f"here/{name}/{rank}" for rank in range(self.world)], coming)
            own = dist.PrefixStore(f"oppo/{name}", self._store)  # type: ignore[attr-defined]
            self._words: Any = dist.ProcessGroupGloo(own, self.rank, self.world, self._wait)
        except RuntimeError as error:
            raise self._lost("meeting the other ranks", error) from error
        self._sums: Any = self._words if device.type == "cpu" else _nccl(own, meeting, self._wait)

    @property
    def first(self) -> bool:
        """See `Ranks.first`."""
        return self.rank == 0

    @property
    def sums_in_turn(self) -> bool:
        """See `Ranks.sums_in_turn`: NCCL's kernels wait on the device, each for its own kind on the others."""
        return self._sums is not self._words

    def part(self, count: int) -> int:
        """See `Ranks.part`; earlier ranks take what is left over."""
        return (count + self.world - 1 - self.rank) // self.world

    def home(self, folder: Path) -> Path:
        """See `Ranks.home`; the first rank's is the folder, as with one rank."""
        return home_of(folder, self.rank)

    def device(self, name: str) -> str:
        """See `Ranks.device`; the first rank's devices are named as with one rank. A node's GPUs have numbers of their own."""
        node, process = divmod(self.rank, self.meeting.a_node)
        places = [f"node{node}"] * (node > 0) + [f"process{process}"] * (process > 0 and name.startswith("cpu"))
        return "/".join([*places, name])

    def cores(self, count: int) -> int:
        """See `Ranks.cores`."""
        return max(1, count // self.meeting.a_node)

    def total(self, values: Iterable[float]) -> list[float]:
        """See `Ranks.total`."""
        sums = torch.tensor(list(values), dtype=torch.float64)
        self._do("adding up", lambda: self._words.allreduce([sums]))
        return [float(value) for value in sums]

    def add_up(self, tensors: list[Tensor]) -> None:
        """See `Ranks.add_up`."""
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self._do("adding up gradients", lambda flat=flat: self._sums.allreduce([flat]))  # type: ignore[misc]
            for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """See `Ranks.any`."""
        return self.total([float(flag)])[0] > 0

    def gather(self, told: bytes) -> list[bytes]:
        """See `Ranks.gather`."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        mine = torch.tensor([len(told)])
        self._do("telling the other ranks", lambda: self._words.allgather([sizes], [mine]))
        longest = max(1, *(int(size) for size in sizes))
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        text = torch.zeros(longest, dtype=torch.uint8)
        text[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8) if told else text[:0]
        self._do("telling the other ranks", lambda: self._words.allgather([texts], [text]))
        return [row.numpy()[: int(size)].tobytes() for row, size in zip(texts, sizes, strict=True)]

    @contextmanager
    def agreed(self, kind: type[Exception]) -> Iterator[None]:
        """See `Ranks.agreed`."""
        said = ""
        try:
            yield
        except kind as error:
            said = str(error)
        faults = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(self.gather(said.encode())) if text]
        if faults:
            raise kind("; ".join(faults))

    @contextmanager
    def reaching(self, what: str) -> Iterator[None]:
        """See `Ranks.reaching`."""
        try:
            yield
        except RuntimeError as error:
            if not any(sign in str(error) for sign in TRANSPORT):
                raise
            raise self._lost(what, error) from error

    def store(self, name: str) -> Any:
        """See `Ranks.store`."""
        return dist.PrefixStore(f"{name}/{self.name}", self._store)  # type: ignore[attr-defined]

    def leave(self, reason: str) -> None:
        """See `Ranks.leave`."""
        with contextlib.suppress(RuntimeError):  # whoever kept the store is gone; the others know without us
            self._store.set(f"left/{self.rank}", reason)

    def close(self) -> None:
        """See `Ranks.close`."""
        del self._words, self._sums, self._store

    def _do(self, what: str, start: Callable[[], dist.Work]) -> None:
        try:
            start().wait(self._wait)
        except RuntimeError as error:  # which rank it was, torch does not say
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: RuntimeError) -> RankError:
        """What to say when the others did not answer: each one's own reason, where it told one."""
        here = f"rank {self.rank} of {self.world}, {what}"
        try:
            reasons = self._reasons()
        except RuntimeError:
            first = str(error).splitlines()[0]
            return RankError(f"{here}: rank 0's node, which keeps the ranks' common store, does not answer ({first})")
        ended = [f"rank {rank} has ended: {reason}" for rank, reason in reasons.items() if reason not in ("", LOST)]
        silent = [f"rank {rank}" for rank, reason in reasons.items() if not reason]
        if silent:
            ended.append(f"{' and '.join(silent)} died, or gave no sign of life for {self.meeting.longest_wait_s:g} s")
        cause = "; ".join(ended) or f"the connection between the ranks is broken ({str(error).splitlines()[0]})"
        return RankError(f"{here}: {cause}")

    def _reasons(self) -> dict[int, str]:
        """Why each other rank has left, empty where it did not say; waits a moment for those that are about to."""
        self._store.set(f"left/{self.rank}", LOST)
        others = [rank for rank in range(self.world) if rank != self.rank]
        until = time.monotonic() + SAYS_WHY_WITHIN_S
        while not self._store.check([f"left/{rank}" for rank in others]) and time.monotonic() < until:
            time.sleep(POLL_S)
        known = [rank for rank in others if self._store.check([f"left/{rank}"])]
        return {rank: self._store.get(f"left/{rank}").decode() if rank in known else "" for rank in others}


def home_of(folder: Path, rank: int) -> Path:
    """Where in a checkpoint's `folder` a rank keeps what is its own."""
    return folder / f"rank-{rank}" if rank else folder


def meeting_of(nodes: int, a_node: int, longest_wait_s: float, environ: Mapping[str, str] = os.environ) -> Meeting | None:
    """Where the ranks meet, from the environment that torchrun makes; None for a run of one rank.

    Raises:
        RankError: other ranks were started than `a_node` on each of `nodes`.
    """
    started, here = int(environ.get("WORLD_SIZE", "1")), int(environ.get("LOCAL_WORLD_SIZE", a_node))
    world = nodes * a_node
    if (started, here) != (world, a_node):
        told = f"{started} ranks were started" + (f", {here} of them here" if here != a_node else "")
        raise RankError(
            f"the run has {world} ranks, {a_node} on each of {nodes} nodes, but {told}; start them with torchrun"
            " (docs/interfaces.md), or change resources.nodes, resources.devices or resources.processes"
        )
    if world == 1:
        return None
    rank, kept = int(environ["RANK"]), environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = int(environ["MASTER_PORT"])
    return Meeting(environ["MASTER_ADDR"], port, rank, world, rank == 0 and not kept, longest_wait_s, a_node)


def join(meeting: Meeting | None, name: str, device: torch.device) -> Ranks:
    """The ranks that meet there as group `name`. Raises RankError, as `SeveralRanks` does."""
    return ALONE if meeting is None else SeveralRanks(meeting, name, device)


def _common_store(meeting: Meeting, within: timedelta) -> Any:
    make = dist.TCPStore  # type: ignore[attr-defined]
    try:
        return make(meeting.address, meeting.port, None, meeting.hosts, within, wait_for_workers=False)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        raise RankError(
            f"rank {meeting.rank} of {meeting.world} does not reach rank 0's node at {meeting.address}:{meeting.port} ({said})"
        ) from error


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in their order, those of one kind together, each bucket within `BUCKET_BYTES` or of one tensor."""
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and (held + size > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += size
    if bucket:
        yield bucket


def _nccl(store: Any, meeting: Meeting, wait: timedelta) -> Any:
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # so that a missing rank is an error here, and no abort of the process
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = wait
    own = dist.PrefixStore("nccl", store)  # type: ignore[attr-defined]
    return dist.ProcessGroupNCCL(own, meeting.rank, meeting.world, options)

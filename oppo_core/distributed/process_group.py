"""Collectives between the ranks of a data-parallel run, over gloo and NCCL (docs/algorithm.md, "Several ranks").

All ranks make the same calls in the same order. Each call ends within the spec's time limit, with the same result on every rank
or with a `RankError` that names the missing rank.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 * 2**20  # gradients reduced in one call
JOIN_TIMEOUT_S = 600.0  # at least; loading models from a slow disk delays ranks
EXIT_REASON_TIMEOUT_S = 5.0  # for other ranks to publish why they ended
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
LOST = "lost sight of another rank"
POLL_S = 0.05
# Texts of torch's connection errors, which have no class of their own.
TRANSPORT = ("gloo/transport", "NCCL", "timed out", "Timed out")


class RankError(RuntimeError):
    """A rank has ended or does not answer (the message names it), or the number of started ranks differs from the spec's."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address of the ranks' shared store. Ranks are numbered node by node, `ranks_per_node` on each.

    `serves_store`: this process serves the TCP store, because torchrun does not.
    """

    address: str
    port: int
    rank: int
    world: int
    serves_store: bool
    timeout_s: float
    ranks_per_node: int = 1


class Ranks:
    """All ranks of a run as seen by one of them. This base class is a run with a single rank.

    Attributes:
        rendezvous: None for a single rank.
        first: whether this is rank 0, which alone publishes checkpoints and writes metrics.
        serialize_reductions: whether two groups of a process must not call `all_reduce` at the same time. NCCL kernels of two
            groups on one device can deadlock.
    """

    rank, world, first, serialize_reductions = 0, 1, True, False
    rendezvous: Rendezvous | None = None

    def device(self, name: str) -> str:
        """The run-wide name of a device of this rank's node. Rank 0's devices are named as in a single-rank run."""
        return name

    def cores(self, count: int) -> int:
        """This rank's share of its node's `count` cores, at least one."""
        return count

    def total(self, values: Iterable[float]) -> list[float]:
        """Each value summed over the ranks."""
        return list(values)

    def largest(self, values: Iterable[float]) -> list[float]:
        """The maximum over the ranks of each value."""
        return list(values)

    def total_counts(self, counts: list[int]) -> list[int]:
        """Each count summed over the ranks."""
        return counts

    def exchange(self, payloads: list[bytes]) -> list[bytes]:
        """Send a payload to each rank; returns those of each rank for this one (all-to-all)."""
        return payloads

    def all_reduce(self, tensors: list[Tensor]) -> None:
        """Sum the tensors over the ranks, in place."""

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. Also a barrier."""
        return flag

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, ordered by rank."""
        return [payload]

    @contextmanager
    def raise_on_all(self, kind: type[Exception]) -> Iterator[None]:
        """Raise an exception of class `kind` on all ranks if the block raises it on any. The block contains no collectives."""
        yield

    @contextmanager
    def rank_errors(self, what: str) -> Iterator[None]:
        """Convert connection errors of another library's collectives to a RankError that names the lost rank and its reason."""
        yield

    def store(self, name: str) -> Any:
        """A torch store shared by all ranks, with keys prefixed by `name`, for another library's process group."""
        return dist.HashStore()  # type: ignore[attr-defined]

    def leave(self, reason: str) -> None:
        """Publish why this rank ends."""

    def close(self) -> None:
        """Close the connections."""


SINGLE = Ranks()


class ProcessGroup(Ranks):
    """One of several ranks: a gloo process group, and on GPUs an NCCL group for gradients.

    The groups are not torch's default group, because a process may be in two: the process that trains the critic sums its
    gradients in a group separate from the actor's.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, device: torch.device) -> None:
        """Join group `name`; blocks until all ranks have joined.

        Raises:
            RankError: a rank did not join in time.
        """
        self.rendezvous, self.name = rendezvous, name
        self.rank, self.world, self.first = rendezvous.rank, rendezvous.world, rendezvous.rank == 0
        self._timeout = timedelta(seconds=rendezvous.timeout_s)
        join_timeout = timedelta(seconds=max(rendezvous.timeout_s, JOIN_TIMEOUT_S))
        self._store = _shared_store(rendezvous, join_timeout)
        try:
            self._store.set(f"here/{name}/{self.rank}", "")
            self._store.wait([f"here/{name}/{rank}" for rank in range(self.world)], join_timeout)
            store = dist.PrefixStore(f"oppo/{name}", self._store)  # type: ignore[attr-defined]
            self._gloo: Any = dist.ProcessGroupGloo(store, self.rank, self.world, self._timeout)
        except RuntimeError as error:
            raise self._rank_error("rendezvous", error) from error
        self._gradients: Any = self._gloo if device.type == "cpu" else _nccl(store, rendezvous, self._timeout)
        self.serialize_reductions = self._gradients is not self._gloo
        self._node, self._local_rank = divmod(self.rank, rendezvous.ranks_per_node)

    def device(self, name: str) -> str:
        prefix = [f"node{self._node}"] * (self._node > 0)
        prefix += [f"process{self._local_rank}"] * (self._local_rank > 0 and name.startswith("cpu"))  # GPUs are numbered per node
        return "/".join([*prefix, name])

    def cores(self, count: int) -> int:
        assert self.rendezvous is not None
        return max(1, count // self.rendezvous.ranks_per_node)

    def total(self, values: Iterable[float]) -> list[float]:
        return self._reduced(torch.tensor(list(values), dtype=torch.float64), dist.ReduceOp.SUM)

    def largest(self, values: Iterable[float]) -> list[float]:
        return self._reduced(torch.tensor(list(values), dtype=torch.float64), dist.ReduceOp.MAX)

    def total_counts(self, counts: list[int]) -> list[int]:
        return self._reduced(torch.tensor(counts, dtype=torch.int64), dist.ReduceOp.SUM)

    def _reduced(self, values: Tensor, operation: Any) -> list[Any]:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        self._run("all-reduce", lambda: self._gloo.allreduce([values], options))
        return values.tolist()

    def exchange(self, payloads: list[bytes]) -> list[bytes]:
        sent, received = [len(payload) for payload in payloads], torch.zeros(self.world, dtype=torch.int64)
        self._run("all-to-all", lambda: self._gloo.alltoall_base(received, torch.tensor(sent), [], []))
        sizes = received.tolist()
        source = torch.frombuffer(bytearray(b"".join(payloads) + b"\0"), dtype=torch.uint8)[:-1]  # torch refuses no bytes
        target = torch.empty(sum(sizes), dtype=torch.uint8)
        self._run("all-to-all", lambda: self._gloo.alltoall_base(target, source, sizes, sent))
        return [part.numpy().tobytes() for part in torch.split(target, sizes)]

    def all_reduce(self, tensors: list[Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self._run("all-reduce of gradients", lambda flat=flat: self._gradients.allreduce([flat]))  # type: ignore[misc]
            for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def any(self, flag: bool) -> bool:
        return self.total([float(flag)])[0] > 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        self._run("all-gather", lambda: self._gloo.allgather([sizes], [torch.tensor([len(payload)])]))
        longest = max(1, *(int(size) for size in sizes))
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        row = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
        self._run("all-gather", lambda: self._gloo.allgather([rows], [row]))
        return [row.numpy()[: int(size)].tobytes() for row, size in zip(rows, sizes, strict=True)]

    @contextmanager
    def raise_on_all(self, kind: type[Exception]) -> Iterator[None]:
        message = ""
        try:
            yield
        except kind as error:
            message = str(error)
        messages = enumerate(self.all_gather(message.encode()))
        if faults := [f"rank {rank}: {text.decode()}" for rank, text in messages if text]:
            raise kind("; ".join(faults))

    @contextmanager
    def rank_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not any(text in str(error) for text in TRANSPORT):
                raise
            raise self._rank_error(what, error) from error

    def store(self, name: str) -> Any:
        return dist.PrefixStore(f"{name}/{self.name}", self._store)  # type: ignore[attr-defined]

    def leave(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store's process has ended, which the other ranks notice themselves
            self._store.set(f"left/{self.rank}", reason)

    def close(self) -> None:
        del self._gloo, self._gradients, self._store

    def _run(self, what: str, start: Callable[[], dist.Work]) -> None:
        try:
            start().wait(self._timeout)
        except RuntimeError as error:  # does not say which rank is lost
            raise self._rank_error(what, error) from error

    def _rank_error(self, what: str, error: RuntimeError) -> RankError:
        """The error for a failed collective, with the reasons that other ranks published."""
        assert self.rendezvous is not None
        here, first_line = f"rank {self.rank} of {self.world}, {what}", str(error).splitlines()[0]
        try:
            reasons = self._exit_reasons()
        except RuntimeError:
            return RankError(f"{here}: rank 0's node, which serves the ranks' store, does not answer ({first_line})")
        causes = [f"rank {rank} has ended: {reason}" for rank, reason in reasons.items() if reason not in ("", LOST)]
        if silent := [f"rank {rank}" for rank, reason in reasons.items() if not reason]:
            causes.append(f"{' and '.join(silent)} died, or gave no sign of life for {self.rendezvous.timeout_s:g} s")
        return RankError(f"{here}: {'; '.join(causes) or f'the connection between the ranks is broken ({first_line})'}")

    def _exit_reasons(self) -> dict[int, str]:
        """Why each other rank ended; empty for a rank that published nothing within `EXIT_REASON_TIMEOUT_S`."""
        self._store.set(f"left/{self.rank}", LOST)
        others = [rank for rank in range(self.world) if rank != self.rank]
        deadline = time.monotonic() + EXIT_REASON_TIMEOUT_S
        while not self._store.check([f"left/{rank}" for rank in others]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        known = [rank for rank in others if self._store.check([f"left/{rank}"])]
        return {rank: self._store.get(f"left/{rank}").decode() if rank in known else "" for rank in others}


def rank_dir(folder: Path, rank: int) -> Path:
    """The folder of a rank's own state in the checkpoint `folder`; for rank 0 the checkpoint folder itself."""
    return folder / f"rank-{rank}" if rank else folder


def rendezvous_from_env(
    nodes: int, ranks_per_node: int, timeout_s: float, environ: Mapping[str, str] = os.environ
) -> Rendezvous | None:
    """The rendezvous from torchrun's environment variables; None for a run of one rank.

    Raises:
        RankError: the number of started ranks is not `nodes` × `ranks_per_node`.
    """
    started, here = int(environ.get("WORLD_SIZE", "1")), int(environ.get("LOCAL_WORLD_SIZE", ranks_per_node))
    world = nodes * ranks_per_node
    if (started, here) != (world, ranks_per_node):
        actual = f"{started} ranks were started" + (f", {here} of them here" if here != ranks_per_node else "")
        raise RankError(
            f"the run has {world} ranks, {ranks_per_node} on each of {nodes} nodes, but {actual}; start them with torchrun"
            " (docs/interfaces.md), or change resources.nodes, resources.devices or resources.processes"
        )
    if world == 1:
        return None
    rank, agent_store = int(environ["RANK"]), environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = int(environ["MASTER_PORT"])
    return Rendezvous(environ["MASTER_ADDR"], port, rank, world, rank == 0 and not agent_store, timeout_s, ranks_per_node)


def join(rendezvous: Rendezvous | None, name: str, device: torch.device) -> Ranks:
    """The ranks of group `name`. Raises RankError, as `ProcessGroup` does."""
    return SINGLE if rendezvous is None else ProcessGroup(rendezvous, name, device)


def _shared_store(rendezvous: Rendezvous, timeout: timedelta) -> Any:
    make = dist.TCPStore  # type: ignore[attr-defined]
    address, port = rendezvous.address, rendezvous.port
    try:
        return make(address, port, None, rendezvous.serves_store, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise RankError(
            f"rank {rendezvous.rank} of {rendezvous.world} cannot reach rank 0's node at {address}:{port}"
            f" ({str(error).splitlines()[0]})"
        ) from error


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, at most `BUCKET_BYTES` per bucket unless a single tensor is larger."""
    bucket: list[Tensor] = []
    total_bytes = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and (total_bytes + size > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, total_bytes = [], 0
        bucket.append(tensor)
        total_bytes += size
    if bucket:
        yield bucket


def _nccl(store: Any, rendezvous: Rendezvous, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    prefixed = dist.PrefixStore("nccl", store)  # type: ignore[attr-defined]
    with blocking_wait(True):
        return dist.ProcessGroupNCCL(prefixed, rendezvous.rank, rendezvous.world, options)


@contextmanager
def blocking_wait(enabled: bool) -> Iterator[None]:
    """Around the construction of NCCL groups, which read `TORCH_NCCL_BLOCKING_WAIT` then.

    With it, waiting for a collective raises after the group's time limit. Torch then starts no watchdog thread, so a
    collective that is not waited for has no time limit. Without it, the watchdog ends the process.
    """
    given = os.environ.pop(BLOCKING_WAIT, None)
    try:
        if enabled:
            os.environ[BLOCKING_WAIT] = "1"
        yield
    finally:
        os.environ.pop(BLOCKING_WAIT, None)
        if given is not None:
            os.environ[BLOCKING_WAIT] = given

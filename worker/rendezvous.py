"""Rendezvous of a run's ranks: the master address sent with a claim, and the `torchrun` command line around the engine."""

from __future__ import annotations

import math
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from oppo_contract.wire import Address, Rendezvous

HOST = "OPPO_RENDEZVOUS_HOST"
PORTS = "OPPO_RENDEZVOUS_PORTS"
TORCHRUN = "torch.distributed.run"
PROCESSES = "--nproc-per-node"
LOCALHOST = "127.0.0.1"
MAX_PORT = 65535
# torchrun's timeout exceeds the platform's deadline, and only matters while the platform is unreachable.
TORCHRUN_MARGIN_S = 60.0


def own_address(platform_url: str) -> Address | None:
    """This node's address for other nodes: `OPPO_RENDEZVOUS_HOST`, or the local address of a connection to the platform.

    The port is free now, and one of `OPPO_RENDEZVOUS_PORTS` (such as `29500-29599`) if set; None if none of those is free. It is
    not reserved until torchrun binds it: if it is taken meanwhile, the engine fails and the run is retried with another port.
    Raises ValueError for an invalid environment (`check_address`).
    """
    ports = _ports()
    random.shuffle(ports)
    port = _first_free(ports, "")
    return None if port is None else Address(host=os.environ.get(HOST, "").strip() or _host_towards(platform_url), port=port)


def _host_towards(platform_url: str) -> str:
    parts = urlsplit(platform_url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname or "127.0.0.1", parts.port or 443))  # sends nothing
        except OSError:  # not IPv4, or no route
            return socket.gethostname()
        return str(probe.getsockname()[0])


def check_address() -> None:
    """Validate OPPO_RENDEZVOUS_HOST and _PORTS. Raises ValueError with a message for users."""
    _ports()
    host = os.environ.get(HOST, "").strip()
    try:
        Address(host=host or LOCALHOST, port=1)
    except ValidationError:
        raise ValueError(
            f"{HOST} is {host!r}; it must be a host name or an IP address, such as gpu1.example.org or 10.0.0.7"
        ) from None


def _ports() -> list[int]:
    """The allowed ports; [0] for any. Raises ValueError."""
    text = os.environ.get(PORTS, "").strip()
    if not text:
        return [0]
    first, _, last = (part.strip() for part in text.partition("-"))
    numbers = [int(part) for part in (first, last or first) if part.isascii() and part.isdigit()]
    if len(numbers) < 2 or not 1 <= numbers[0] <= numbers[1] <= MAX_PORT:
        raise ValueError(f"{PORTS} is {text!r}; it must be one port or one range, 1 to {MAX_PORT}, such as 29500-29599")
    return list(range(numbers[0], numbers[1] + 1))


def _first_free(ports: Sequence[int], host: str) -> int | None:
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return None


def ranks_per_node(spec: Mapping[str, object]) -> int:
    """Ranks per node of a spec as plain data (`Resources.ranks_per_node`)."""
    resources = spec.get("resources")
    if not isinstance(resources, dict):
        return 1
    each = resources.get("devices", 1) // resources.get("nodes", 1)
    not_training = resources.get("decoding_devices", 0) + resources.get("scoring_devices", 0)
    return int(resources.get("processes") or each - not_training)


def torchrun(command: Sequence[str], processes: int, rendezvous: Rendezvous | None) -> list[str]:
    """Wrap the engine's command line in torchrun, with this many processes on this node and without restarts.

    `rendezvous`: with other nodes. If None, all processes are on this node and use a port that is free now; if it is taken
    meanwhile, the engine fails and the run is retried with another port.
    """
    nodes, rank = (rendezvous.nodes, rendezvous.node_rank) if rendezvous else (1, 0)
    host, port = (rendezvous.address.host, rendezvous.address.port) if rendezvous else (LOCALHOST, _first_free([0], LOCALHOST))
    options = [
        "--nnodes", str(nodes), "--node-rank", str(rank), PROCESSES, str(processes),
        f"--master-addr={host}", "--master-port", str(port), "--max-restarts", "0",
        "--log-dir", os.devnull,  # otherwise a killed torchrun leaves an empty folder
    ]  # fmt: skip
    if rendezvous:
        options += ["--rdzv-conf", f"timeout={math.ceil(rendezvous.deadline_s + TORCHRUN_MARGIN_S)}"]
    run = ["-m", TORCHRUN, *options]
    if Path(command[0]).name.startswith("python"):
        return [command[0], *run, *command[1:]]
    return [sys.executable, *run, "--no-python", *command]


def torchrun_environ(command: Sequence[str]) -> dict[str, str]:
    """OMP_NUM_THREADS as torchrun would set it, with a warning in the log, for several processes."""
    several = TORCHRUN in command and command[command.index(PROCESSES) + 1] != "1"
    return {"OMP_NUM_THREADS": "1"} if several else {}

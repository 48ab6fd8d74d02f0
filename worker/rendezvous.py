"""How the engines of a run meet, on several nodes or several on one: the address that this node tells when it claims, and
`torchrun` around the engine.
"""

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
THIS_MACHINE = "127.0.0.1"
MAX_PORT = 65535
# The platform's deadline is the one that decides; torchrun gives up by itself only if the platform is away.
LATER_THAN_THE_PLATFORM_S = 60.0


def own_address(platform_url: str) -> Address | None:
    """Where engines on other nodes reach one on this node: `OPPO_RENDEZVOUS_HOST`, or the address that the platform sees.

    The port is free now, one of `OPPO_RENDEZVOUS_PORTS` (`29500-29599`) if that is set; None when none of those is. Nothing holds
    it until torchrun binds it: if somebody is faster, the engine ends at once, and the run is tried again with another one.
    Raises ValueError where the environment names none (`check_address`).
    """
    port = _free_port()
    return None if port is None else Address(host=os.environ.get(HOST, "").strip() or _host_towards(platform_url), port=port)


def _host_towards(platform_url: str) -> str:
    parts = urlsplit(platform_url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname or "127.0.0.1", parts.port or 443))  # sends nothing
        except OSError:  # an address that is not IPv4's, or no way there: the name is the best guess
            return socket.gethostname()
        return str(probe.getsockname()[0])


def check_address() -> None:
    """Whether a claim could tell what the environment says of it. Raises ValueError with what is wrong, for people."""
    _ports()
    host = os.environ.get(HOST, "").strip()
    try:
        Address(host=host or THIS_MACHINE, port=1)
    except ValidationError:
        raise ValueError(
            f"{HOST} is {host!r}; it must be a host name or an IP address, such as gpu1.example.org or 10.0.0.7"
        ) from None


def _free_port() -> int | None:
    ports = _ports()
    random.shuffle(ports)
    return _free_one_of(ports, "")


def _ports() -> list[int]:
    """The ports that may be told; 0 stands for any. Raises ValueError."""
    said = os.environ.get(PORTS, "").strip()
    if not said:
        return [0]
    first, _, last = (part.strip() for part in said.partition("-"))
    numbers = [int(part) for part in (first, last or first) if part.isascii() and part.isdigit()]
    if len(numbers) < 2 or not 1 <= numbers[0] <= numbers[1] <= MAX_PORT:
        raise ValueError(f"{PORTS} is {said!r}; it must be one port or one range, 1 to {MAX_PORT}, such as 29500-29599")
    return list(range(numbers[0], numbers[1] + 1))


def _free_one_of(ports: Sequence[int], host: str) -> int | None:
    """0 stands for any port."""
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return None


def processes_of(spec: Mapping[str, object]) -> int:
    """Ranks per node of a spec as plain data (`Resources.ranks_per_node`)."""
    resources = spec.get("resources")
    if not isinstance(resources, dict):
        return 1
    each = resources.get("devices", 1) // resources.get("nodes", 1)
    elsewhere = resources.get("decoding_devices", 0) + resources.get("scoring_devices", 0)
    return int(resources.get("processes") or each - elsewhere)


def torchrun(command: Sequence[str], processes: int, meeting: Rendezvous | None) -> list[str]:
    """The engine's command line below torchrun: so many processes on this node, and none is started again by it.

    `meeting`: with other nodes; None where all processes are on this one. They meet at a port that is free now: if somebody is
    faster, they end at once, and the run is tried again with another one.
    """
    nodes, rank = (meeting.nodes, meeting.node_rank) if meeting else (1, 0)
    host, port = (meeting.address.host, meeting.address.port) if meeting else (THIS_MACHINE, _free_one_of([0], THIS_MACHINE))
    options = [
        "--nnodes", str(nodes), "--node-rank", str(rank), PROCESSES, str(processes),
        f"--master-addr={host}", "--master-port", str(port), "--max-restarts", "0",
        "--log-dir", os.devnull,  # it writes no logs of its own, and would leave an empty folder behind when it is killed
    ]  # fmt: skip
    if meeting:
        options += ["--rdzv-conf", f"timeout={math.ceil(meeting.deadline_s + LATER_THAN_THE_PLATFORM_S)}"]
    run = ["-m", TORCHRUN, *options]
    if Path(command[0]).name.startswith("python"):
        return [command[0], *run, *command[1:]]
    return [sys.executable, *run, "--no-python", *command]


def threads_below(command: Sequence[str]) -> dict[str, str]:
    """What torchrun would tell several engines of a node, with a warning in the log; they choose their threads themselves."""
    several = TORCHRUN in command and command[command.index(PROCESSES) + 1] != "1"
    return {"OMP_NUM_THREADS": "1"} if several else {}

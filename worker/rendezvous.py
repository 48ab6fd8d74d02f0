"""How engines on several nodes meet: the address that this node tells when it claims, and `torchrun` around the engine."""

from __future__ import annotations

import math
import os
import random
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from oppo_contract.wire import Address, Rendezvous

HOST = "OPPO_RENDEZVOUS_HOST"
PORTS = "OPPO_RENDEZVOUS_PORTS"
TORCHRUN = "torch.distributed.run"
# The platform's deadline is the one that decides; torchrun gives up by itself only if the platform is away.
LATER_THAN_THE_PLATFORM_S = 60.0


def own_address(platform_url: str) -> Address | None:
    """Where engines on other nodes reach one on this node: `OPPO_RENDEZVOUS_HOST`, or the address that the platform sees.

    The port is free now, one of `OPPO_RENDEZVOUS_PORTS` (`29500-29599`) if that is set; None when none of those is. Nothing holds
    it until torchrun binds it: if somebody is faster, the engine ends at once, and the run is tried again with another one.
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


def _free_port() -> int | None:
    first, _, last = os.environ.get(PORTS, "").partition("-")
    ports = list(range(int(first), int(last or first) + 1)) if first else [0]
    random.shuffle(ports)
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return None


def torchrun(command: Sequence[str], meeting: Rendezvous) -> list[str]:
    """The engine's command line below torchrun: one process on this node, and none is started again by it."""
    options = [
        "--nnodes", str(meeting.nodes), "--node-rank", str(meeting.node_rank), "--nproc-per-node", "1",
        f"--master-addr={meeting.address.host}", "--master-port", str(meeting.address.port), "--max-restarts", "0",
        "--rdzv-conf", f"timeout={math.ceil(meeting.deadline_s + LATER_THAN_THE_PLATFORM_S)}",
    ]  # fmt: skip
    run = ["-m", TORCHRUN, *options]
    if Path(command[0]).name.startswith("python"):
        return [command[0], *run, *command[1:]]
    return [sys.executable, *run, "--no-python", *command]

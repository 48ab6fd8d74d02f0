"""Starts the worker's processes: `python -m worker agent | consume | supervise ATTEMPT EPOCH`. Users run `oppo worker`."""

from __future__ import annotations

import importlib
import sys

USAGE = "use: python -m worker agent [--keep-attempts] | consume | supervise ATTEMPT EPOCH\n"
# Imported by the fork server; the last two are otherwise imported lazily.
SUPERVISOR_MODULES = ("worker.supervisor", "httpcore", "pynvml")


def main(arguments: list[str]) -> int:
    """Run one of the worker's processes. Returns the exit status."""
    match arguments:
        case ["agent"] | ["agent", "--keep-attempts"]:
            from worker.agent import run_agent

            return run_agent(keep_attempts=len(arguments) == 2)
        case ["consume"]:
            from worker.consumer import consume

            return consume()
        case ["supervise", attempt_id, epoch] if attempt_id.isdigit() and epoch.isdigit():
            from worker.supervisor import supervise

            return supervise(int(attempt_id), int(epoch))
    sys.stderr.write(USAGE)
    return 2


def preload() -> None:
    """In a fork server: import the supervisor's modules and load the CA certificates."""
    for name in SUPERVISOR_MODULES:
        importlib.import_module(name)
    from worker.platform_api import tls_context

    tls_context()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

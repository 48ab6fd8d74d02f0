"""The worker's processes: `python -m worker agent | consume | supervise ATTEMPT EPOCH`. People use `oppo worker`."""

from __future__ import annotations

import sys

USAGE = "use: python -m worker agent [--keep-attempts] | consume | supervise ATTEMPT EPOCH\n"


def main(arguments: list[str]) -> int:
    """Run one of the worker's processes; returns its exit status."""
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
        case ["standby", control_fd, _] if control_fd.isdigit():
            from worker.standby import supervise_what_comes

            return supervise_what_comes(int(control_fd))
    sys.stderr.write(USAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

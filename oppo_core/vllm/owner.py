"""Ties vLLM's processes to the process that started them: they end with it, and signals to its group do not reach them.

vLLM loads `follow_owner` in each of its processes (entry point `vllm.general_plugins`, pyproject.toml). Left alone they would
survive a trainer that is killed, with a GPU's memory, and end at a Ctrl-C before the trainer's last chunk.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

OWNER = "OPPO_VLLM_OWNER"  # environment variable: process id of the owner
SOCKETS = "VLLM_RPC_BASE_PATH"
POLL_S = 0.5


def shared_prefix(kind: str) -> str:
    """Begin of the name of a file or folder in shared memory that this process makes, for `_remove_files`."""
    return f"oppo-{kind}-{os.getpid()}-"


def follow_owner() -> None:
    """In a process of vLLM: leave the owner's process group, and end when the owner does. Elsewhere a no-op."""
    owner = int(os.environ.get(OWNER, 0))
    if not owner or owner == os.getpid():
        return
    with suppress(PermissionError):  # the leader of a session leads a group already
        os.setpgid(0, 0)
    threading.Thread(target=_end_with, args=(owner,), name="oppo-owner", daemon=True).start()


def _end_with(owner: int) -> None:
    import psutil  # vLLM needs it, too

    try:
        process = psutil.Process(owner)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(POLL_S)
    except psutil.NoSuchProcess:
        pass
    _remove_files(owner)
    os.kill(os.getpid(), signal.SIGKILL)


def _remove_files(owner: int) -> None:
    """What the owner would have removed."""
    from oppo_core.models.shared_weights import SHARED_MEMORY

    sockets = Path(os.environ[SOCKETS])
    for folder in (SHARED_MEMORY, sockets.parent):
        for path in folder.glob(f"oppo-*-{owner}-*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(sockets, ignore_errors=True)

"""A temporary folder of the session's own: tests and the programs that they start leave nothing in the machine's.

    oppo-tests-XXXXXXXX/tmp     TMPDIR of this process and of all below it
    oppo-tests-XXXXXXXX/home-…  OPPO_HOME of a process that reads tests/settings.py

A shell removes the folder when this process ends, however it ends: a pipe from here to there closes then.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from multiprocessing.util import Finalize
from pathlib import Path

VARIABLE = "OPPO_TEST_SCRATCH"
# Of pytest, of torch when it is imported, what multiprocessing removes when its process ends, of Chromium, and the file
# with which `tempfile` probes the folder, if a test kills the process meanwhile.
EXPECTED = ("pytest-of-*", "torchinductor_*", "pymp-*", ".org.chromium.Chromium.*", "[a-z0-9_]" * 8)
AFTER_MULTIPROCESSING = -1000
REMOVE = 'cat; test -e "$0" || exit 0; sleep 1; chmod -R u+rwX "$0" 2>/dev/null; rm -rf "$0"'
ENDING_S = 10.0


class Scratch:
    """The folder."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="oppo-tests-"))
        self.tmp = self.folder / "tmp"
        self.tmp.mkdir()
        # Servers that a test starts under another account open their own folders below.
        self.folder.chmod(0o711)
        self._remover = subprocess.Popen(["/bin/sh", "-c", REMOVE, self.folder], stdin=subprocess.PIPE, start_new_session=True)
        os.environ |= {"TMPDIR": str(self.tmp), VARIABLE: str(self.folder)}
        tempfile.tempdir = None
        Finalize(None, self._remove, exitpriority=AFTER_MULTIPROCESSING)

    def left(self) -> list[str]:
        """Names of what was left, once processes that are ending have had time to remove what is theirs."""
        until = time.monotonic() + ENDING_S
        while (names := self._unexpected()) and time.monotonic() < until:
            time.sleep(0.1)
        return names

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._remover.communicate()

    def _unexpected(self) -> list[str]:
        return sorted(path.name for path in self.tmp.iterdir() if not any(path.match(pattern) for pattern in EXPECTED))


MADE: list[Scratch] = []


def begin() -> None:
    """Make the folder, unless this process or one above has made it: before anything asks for a temporary folder."""
    if VARIABLE not in os.environ:
        MADE.append(Scratch())

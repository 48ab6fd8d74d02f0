"""Live progress: one line that is written again and again on a terminal, a card in a notebook, lines now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, TextIO

from oppo_client.optional_deps import in_notebook, needed
from oppo_client.run_base import RunFacts

LINE_EVERY_S = 30.0


class View(Protocol):
    """Where progress is shown."""

    def show(self, run: RunFacts) -> None:
        """The run has moved on."""

    def end(self, run: RunFacts) -> None:
        """Nothing more will come."""


def view(file: TextIO | None = None) -> View:
    """What fits the place: a notebook's cell, a terminal, or a file."""
    if file is None and in_notebook():
        return NotebookView()
    out = file or sys.stdout
    return TerminalView(out) if out.isatty() else LinesView(out)


class TerminalView:
    """One line, overwritten."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._state = ""

    def show(self, run: RunFacts) -> None:
        """Write the line again; a line of its own for every state."""
        import shutil

        wide = shutil.get_terminal_size().columns - 1
        if self._state and self._state != run.state:
            self._out.write("\n")
        self._state = run.state
        self._out.write("\r\x1b[2K" + run.line()[:wide])
        self._out.flush()

    def end(self, run: RunFacts) -> None:
        """Leave the line and show where the run can be looked at."""
        self._out.write(f"\n{run.url}\n")
        self._out.flush()


class LinesView:
    """A line when the state changes, and otherwise twice a minute: for logs."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._state, self._told_at = "", 0.0

    def show(self, run: RunFacts) -> None:
        """A line, if it is time for one."""
        now = time.monotonic()
        if run.state != self._state or now - self._told_at >= LINE_EVERY_S:
            self._state, self._told_at = run.state, now
            print(run.line(), file=self._out, flush=True)

    def end(self, run: RunFacts) -> None:
        """Nothing: the last state has been told."""


class NotebookView:
    """A card that is shown once and then replaced."""

    def __init__(self) -> None:
        self._display: Any = None

    def show(self, run: RunFacts) -> None:
        """Show the card, or replace it."""
        if self._display is None:
            self._display = needed("IPython.display", "Live progress").display(run, display_id=True)
        else:
            self._display.update(run)

    def end(self, run: RunFacts) -> None:
        """The card stays as it is."""

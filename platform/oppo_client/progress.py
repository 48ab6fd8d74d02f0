"""Live progress of `Run.watch`: an updated line on a terminal, a card in a notebook, periodic lines in a log."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any, Protocol, TextIO

from oppo_client.optional_deps import in_notebook, require
from oppo_client.run_base import RunBase

LINE_INTERVAL_S = 30.0


class View(Protocol):
    """Display of a run's progress."""

    def show(self, run: RunBase) -> None:
        """Show the run's new summary."""

    def end(self, run: RunBase) -> None:
        """Finish the display."""


def create_view(file: TextIO | None = None) -> View:
    """The view for a notebook cell, a terminal or a file."""
    if file is None and in_notebook():
        return NotebookView()
    out = file or sys.stdout
    return TerminalView(out) if out.isatty() else LinesView(out)


class TerminalView:
    """One line, overwritten."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._state = ""

    def show(self, run: RunBase) -> None:
        """Overwrite the line; a new state starts a new line."""
        width = shutil.get_terminal_size().columns - 1
        if self._state and self._state != run.state:
            self._out.write("\n")
        self._state = run.state
        self._out.write("\r\x1b[2K" + run.line()[:width])
        self._out.flush()

    def end(self, run: RunBase) -> None:
        """Print the run's URL."""
        self._out.write(f"\n{run.url}\n")
        self._out.flush()


class LinesView:
    """A line for every change of state, and every 30 s."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._state, self._printed_at = "", 0.0

    def show(self, run: RunBase) -> None:
        """Print a line if the state changed or 30 s have passed."""
        now = time.monotonic()
        if run.state != self._state or now - self._printed_at >= LINE_INTERVAL_S:
            self._state, self._printed_at = run.state, now
            print(run.line(), file=self._out, flush=True)

    def end(self, run: RunBase) -> None:
        """Nothing: the last state is printed."""


class NotebookView:
    """A card that is updated in place."""

    def __init__(self) -> None:
        self._display: Any = None

    def show(self, run: RunBase) -> None:
        """Show or update the card."""
        if self._display is None:
            self._display = require("IPython.display", "Live progress").display(run, display_id=True)
        else:
            self._display.update(run)

    def end(self, run: RunBase) -> None:
        """Nothing: the card stays."""

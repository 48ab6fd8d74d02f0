"""All trackers of a run: they hear what the journal writes, and what they have to say goes into the journal's log."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from oppo_contract.spec import PLATFORM_SECTIONS, RunSpec
from oppo_core.reporting.event_log import Journal
from oppo_core.trackers.feed import Feed
from oppo_core.trackers.order import TITLES, Order

WHEN_STOPPED_S = 5.0  # a pause, and more so a node that shuts down, cannot wait for long


class Trackers:
    """None at first; `start` reads the spec."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.feeds: list[Feed] = []
        self._every = 0
        self._flush_s = 0.0

    def start(self, spec: RunSpec, out: Path) -> None:
        """Start a process for every tracker that `spec` names."""
        settings = spec.logging.trackers
        self._every, self._flush_s = settings.samples_every, settings.flush_s
        plain = spec.model_dump(mode="json", exclude=set(PLATFORM_SECTIONS))
        for name, section in settings.chosen.items():
            try:
                self.feeds.append(Feed(Order(name, section.model_dump(), plain, str(out.absolute()))))
            except OSError as error:
                self._log([f"{TITLES[name]} cannot be started ({error}): nothing is told to it. Training goes on."])
        if self.feeds:
            self._journal.hear = self.hear

    def hear(self, kind: str, payload: dict[str, Any], line: str) -> None:
        """The journal has written this."""
        if kind == "samples" and not (self._every and payload["step"] % self._every == 0):
            return
        if kind in ("started", "step", "samples"):
            for feed in self.feeds:
                feed.put(kind, line)
        if kind == "step":
            self._log([said for feed in self.feeds for said in feed.news()])

    def close(self, outcome: str) -> None:
        """The run ends or is paused: give them time to take what waits, the same to all, and tell what was lost."""
        until = time.monotonic() + (min(self._flush_s, WHEN_STOPPED_S) if outcome == "stopped" else self._flush_s)
        said = [word for feed in self.feeds for word in feed.news()]
        for feed in self.feeds:
            feed.end(outcome)
        for feed in self.feeds:
            said += feed.wait(until)
        self.feeds = []
        self._log(said)

    def _log(self, lines: list[str]) -> None:
        if lines:
            self._journal.write("log", stream="stdout", lines=lines)

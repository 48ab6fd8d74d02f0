"""What is known of a run without asking, and how it looks: the half of `Run` and `AsyncRun` that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oppo_client.html import badge, bar, cell, duration, escaped, sparkline
from oppo_client.pagination import ENDED

REWARD = "critic/score/mean"


class RunFacts:
    """A run's newest summary. `refresh()` fetches another one; every call that changes the run does, too."""

    def __init__(self, summary: Mapping[str, Any], page: str) -> None:
        self._page = page
        self._rewards: list[float | None] = []
        self._take(summary)

    def _take(self, summary: Mapping[str, Any]) -> None:
        self.summary: dict[str, Any] = dict(summary)
        reward = self.latest.get(REWARD)
        if reward is not None:
            self._rewards = [*self._rewards, reward][-200:]

    @property
    def id(self) -> int:
        """Its number, as in its page's address."""
        return int(self.summary["id"])

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.summary["name"])

    @property
    def state(self) -> str:
        """queued, allocated, starting, running, pausing, paused, preempting, cancelling, succeeded, failed or cancelled."""
        return str(self.summary["state"])

    @property
    def ended(self) -> bool:
        """Whether it has succeeded, failed or been cancelled."""
        return self.state in ENDED

    @property
    def reason(self) -> str:
        """Why it is in this state: why it waits, how it ended."""
        return str(self.summary["reason"])

    @property
    def step(self) -> int:
        """PPO steps that are done."""
        return int(self.summary["step"])

    @property
    def total_steps(self) -> int:
        """PPO steps that it is to do."""
        return int(self.summary["total_steps"])

    @property
    def project(self) -> str:
        """Its project."""
        return str(self.summary["project"])

    @property
    def tags(self) -> list[str]:
        """Its tags."""
        return list(self.summary["tags"])

    @property
    def priority(self) -> int:
        """1 to 99; higher goes first within the team."""
        return int(self.summary["priority"])

    @property
    def latest(self) -> dict[str, float | None]:
        """The newest value of every metric; None where it was not finite."""
        return dict(self.summary["latest"])

    @property
    def eta_s(self) -> float | None:
        """Seconds until it ends, if that can be told."""
        eta: float | None = self.summary["eta_s"]
        return eta

    @property
    def url(self) -> str:
        """The address of its page."""
        return self._page + str(self.summary["url"])

    def line(self) -> str:
        """Its state in one line of text."""
        parts = [f"run {self.id} {_plain(self.name)}", self.state, f"step {self.step}/{self.total_steps}"]
        parts += [f"reward {cell(self.latest[REWARD])}"] if self.latest.get(REWARD) is not None else []
        parts += [f"bubble {self.summary['bubble']:.0%}"] if self.summary.get("bubble") is not None else []
        parts += [f"{duration(self.eta_s)} left"] if self.eta_s is not None and not self.ended else []
        parts += [_plain(self.reason)] if self.reason and self.state != "running" else []
        return " · ".join(parts)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.name!r} {self.state} step {self.step}/{self.total_steps}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFacts) and (self.id, self._page) == (other.id, other._page)

    def __hash__(self) -> int:
        return hash((self.id, self._page))

    def _repr_html_(self) -> str:
        return run_html(self, self._rewards)


def run_html(run: RunFacts, rewards: Sequence[float | None]) -> str:
    """A run as a notebook shows it: state, progress, the reward so far, and why it is not running when it is not."""
    share = run.step / run.total_steps if run.total_steps else 0.0
    eta = f", {duration(run.eta_s)} left" if run.eta_s is not None and not run.ended else ""
    reward = run.latest.get(REWARD)
    curve = sparkline(rewards, f"reward, now {cell(reward)}")
    told = f" <small>reward {escaped(cell(reward))}</small>" if reward is not None else ""
    reason = f"<br><small>{escaped(run.reason)}</small>" if run.reason and run.state != "running" else ""
    error = f'<pre style="margin:.3em 0">{escaped(run.summary["error"])}</pre>' if run.summary.get("error") else ""
    link = f'<a href="{escaped(run.url)}" target="_blank" rel="noopener">run {run.id}</a>'
    return (
        f"<div>{link} <b>{escaped(run.name)}</b> {badge(run.state)}<br>"
        f"{bar(share, f'step {run.step} of {run.total_steps}{eta}')} {curve}{told}{reason}{error}</div>"
    )


def _plain(text: str) -> str:
    """Without line breaks and control characters, which would move a terminal's cursor."""
    return "".join(c if c.isprintable() else " " for c in text)

"""`RunBase`: a run's last summary, as properties, text and HTML, without requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oppo_client.html import badge, bar, cell, duration, escaped, sparkline

ENDED = frozenset({"succeeded", "failed", "cancelled"})
REWARD = "critic/score/mean"


class RunBase:
    """A run's last summary. `base_url` is the platform's address."""

    def __init__(self, summary: Mapping[str, Any], base_url: str) -> None:
        self._base_url = base_url
        self._rewards: list[float | None] = []
        self._update(summary)

    def _update(self, summary: Mapping[str, Any]) -> None:
        self.summary: dict[str, Any] = dict(summary)
        reward = self.latest.get(REWARD)
        if reward is not None:
            self._rewards = [*self._rewards, reward][-200:]

    @property
    def id(self) -> int:
        """Number, as in the page's URL."""
        return int(self.summary["id"])

    @property
    def name(self) -> str:
        """Name."""
        return str(self.summary["name"])

    @property
    def state(self) -> str:
        """queued, allocated, starting, running, pausing, paused, preempting, cancelling, succeeded, failed or cancelled."""
        return str(self.summary["state"])

    @property
    def ended(self) -> bool:
        """Whether the run has succeeded, failed or been cancelled."""
        return self.state in ENDED

    @property
    def reason(self) -> str:
        """Reason of the state: why the run waits, or how it ended."""
        return str(self.summary["reason"])

    @property
    def step(self) -> int:
        """Completed PPO steps."""
        return int(self.summary["step"])

    @property
    def total_steps(self) -> int:
        """Configured PPO steps."""
        return int(self.summary["total_steps"])

    @property
    def project(self) -> str:
        """Name of the project."""
        return str(self.summary["project"])

    @property
    def tags(self) -> list[str]:
        """Tags."""
        return list(self.summary["tags"])

    @property
    def priority(self) -> int:
        """1 to 99; higher starts first within the team."""
        return int(self.summary["priority"])

    @property
    def latest(self) -> dict[str, float | None]:
        """Latest value of every metric; None if not finite."""
        return dict(self.summary["latest"])

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds to the end, if known."""
        eta: float | None = self.summary["eta_s"]
        return eta

    @property
    def url(self) -> str:
        """URL of the page."""
        return self._base_url + str(self.summary["url"])

    def line(self) -> str:
        """One line of text: name, state, step, reward, bubble, ETA, reason."""
        parts = [f"run {self.id} {_plain(self.name)}", self.state, f"step {self.step}/{self.total_steps}"]
        parts += [f"reward {cell(self.latest[REWARD])}"] if self.latest.get(REWARD) is not None else []
        parts += [f"bubble {self.summary['bubble']:.0%}"] if self.summary.get("bubble") is not None else []
        parts += [f"{duration(self.eta_s)} left"] if self.eta_s is not None and not self.ended else []
        parts += [_plain(self.reason)] if self.reason and self.state != "running" else []
        return " · ".join(parts)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.name!r} {self.state} step {self.step}/{self.total_steps}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunBase) and (self.id, self._base_url) == (other.id, other._base_url)

    def __hash__(self) -> int:
        return hash((self.id, self._base_url))

    def _repr_html_(self) -> str:
        return run_html(self, self._rewards)


def run_html(run: RunBase, rewards: Sequence[float | None]) -> str:
    """A run as HTML for notebooks: state, progress, reward curve, and the reason if it is not running."""
    share = run.step / run.total_steps if run.total_steps else 0.0
    eta = f", {duration(run.eta_s)} left" if run.eta_s is not None and not run.ended else ""
    reward = run.latest.get(REWARD)
    curve = sparkline(rewards, f"reward, now {cell(reward)}")
    reward_text = f" <small>reward {escaped(cell(reward))}</small>" if reward is not None else ""
    reason = f"<br><small>{escaped(run.reason)}</small>" if run.reason and run.state != "running" else ""
    error = f'<pre style="margin:.3em 0">{escaped(run.summary["error"])}</pre>' if run.summary.get("error") else ""
    link = f'<a href="{escaped(run.url)}" target="_blank" rel="noopener">run {run.id}</a>'
    return (
        f"<div>{link} <b>{escaped(run.name)}</b> {badge(run.state)}<br>"
        f"{bar(share, f'step {run.step} of {run.total_steps}{eta}')} {curve}{reward_text}{reason}{error}</div>"
    )


def _plain(text: str) -> str:
    """Text without line breaks and control characters, which would move a terminal's cursor."""
    return "".join(c if c.isprintable() else " " for c in text)

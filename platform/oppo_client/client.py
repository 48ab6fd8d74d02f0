"""The client for code that waits for each answer. Its asynchronous twin is `aio.AsyncClient`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from oppo_client import operations, spec_source
from oppo_client.comparison import Comparison
from oppo_client.config import load_config
from oppo_client.retry import Retries
from oppo_client.run import Run
from oppo_client.run_base import RunFacts
from oppo_client.sans_io import Feed, Flow, asked, post
from oppo_client.tables import framed
from oppo_client.transport import AGENT, Transport

T = TypeVar("T")


class Client:
    """OPPO Platform, over its API. Nothing is cached, and nothing is asked before the first call.

    Args:
        url, token: else `$OPPO_URL` and `$OPPO_TOKEN`, else the configuration file (`config`).
        retries: how often, and after how long, a request is sent again.

    Raises `ConfigError` when no address or token is known; calls raise `Unreachable` when nothing answers, and `ApiError`s.
    """

    def __init__(self, url: str | None = None, token: str | None = None, *, retries: Retries | None = None) -> None:
        config = load_config(url, token)
        self.url = config.url
        self.retries = retries or Retries()
        self._transport = Transport(config, AGENT)

    def __repr__(self) -> str:
        return f"<Client of {self.url}>"

    def perform(self, flow: Flow[T]) -> T:
        """Drive a call to its end."""
        return self._transport.perform(flow)

    def iterate(self, feed: Feed[T]) -> Iterator[T]:
        """Drive a listing; items are fetched as they are asked for."""
        return self._transport.iterate(feed)

    def me(self) -> dict[str, Any]:
        """Who the token acts as, and what it may."""
        return self.perform(operations.me(self.retries))

    def submit(
        self,
        spec: spec_source.Source | None = None,
        *,
        yaml: str | None = None,
        project: str | int | None = None,
        overrides: spec_source.Changes | None = None,
    ) -> Run:
        """Queue a run.

        Args:
            spec: the name of a YAML file, or the spec as a mapping. yaml: the spec as text.
            project: name or number; by default the first one of the token's team.
            overrides: other values at dotted paths: `{"overlap.overcommit.max": 8, "seed": 2}`.

        Raises `Refused` with every complaint, field by field.
        """
        body = spec_source.body_of(spec, yaml, project)
        return Run(self, self.perform(spec_source.submit(body, overrides, self.retries)))

    def validate(
        self,
        spec: spec_source.Source | None = None,
        *,
        yaml: str | None = None,
        project: str | int | None = None,
        overrides: spec_source.Changes | None = None,
    ) -> dict[str, Any]:
        """What `submit` would say, without a run: `{"ok", "problems", "spec", "yaml"}`, defaults included when it is fine."""
        return self.perform(spec_source.validate(spec_source.body_of(spec, yaml, project), overrides, self.retries))

    def get(self, run_id: int) -> Run:
        """A run by its number. Raises `NotFound`."""
        return Run(self, self.perform(operations.show(run_id, self.retries)))

    def runs(
        self, filter: str = "", sort: str = "", *, project: str | int = "", state: str | Iterable[str] = ""
    ) -> Iterator[Run]:
        """Runs of your teams, newest first, page by page; `filter` and `sort` as on the page (docs/runs.md)."""
        return (Run(self, told) for told in self.iterate(operations.runs(filter, sort, str(project), state, self.retries)))

    def queue(self, frame: bool | None = None) -> Any:
        """Your waiting runs in their order: why they wait, what would start them sooner, and when they may start."""
        return framed(self.perform(operations.queue(self.retries)), frame)

    def cluster(self) -> list[dict[str, Any]]:
        """The nodes and their devices, as `GET cluster` has them."""
        return self.perform(operations.items("cluster", self.retries))

    def quotas(self) -> list[dict[str, Any]]:
        """Pools with what your teams own and borrow of each, as `GET quotas` has them."""
        return self.perform(operations.items("quotas", self.retries))

    def teams(self) -> list[dict[str, Any]]:
        """Your teams: `{"id", "name", "role", "projects"}`."""
        return self.perform(operations.items("teams", self.retries))

    def alerts(
        self, *, open: bool = False, team: int | None = None, run: RunFacts | int | None = None, condition: str = ""
    ) -> Iterator[dict[str, Any]]:
        """Alerts of your teams' runs, newest first; `open` leaves out those that are over (docs/alerts.md)."""
        return self.iterate(operations.alerts(open, team, run, condition, self.retries))

    def acknowledge(self, alert: int) -> dict[str, Any]:
        """Say that you take care of an alert; the alert. Raises `Forbidden` for viewers."""
        return self.perform(asked(post(f"alerts/{int(alert)}/acknowledge"), self.retries))

    def audit(self, team: int, *, actor: str = "", action: str = "") -> Iterator[dict[str, Any]]:
        """Who did what in a team, newest first; for its owners. Raises `Forbidden`."""
        return self.iterate(operations.audit(team, actor, action, self.retries))

    def webhooks(self, team: int) -> list[dict[str, Any]]:
        """Where a team's alerts are posted; for its owners."""
        return self.perform(operations.items(f"teams/{int(team)}/webhooks", self.retries))

    def add_webhook(self, team: int, url: str, conditions: Iterable[str]) -> dict[str, Any]:
        """Post a team's alerts to an https address: the webhook with its `secret`, which is shown this once."""
        return self.perform(operations.add_webhook(team, url, conditions, self.retries))

    def change_webhook(self, team: int, webhook: int, *, on: bool, conditions: Iterable[str]) -> dict[str, Any]:
        """Switch a webhook, and choose what is posted to it."""
        return self.perform(operations.change_webhook(team, webhook, on, conditions, self.retries))

    def delete_webhook(self, team: int, webhook: int) -> None:
        """Post there no more."""
        self.perform(operations.remove_webhook(team, webhook, self.retries))

    def compare(
        self,
        runs: Iterable[RunFacts | int],
        *,
        keys: Iterable[str] = (),
        x: str = "step",
        target_reward: float | None = None,
        baseline: RunFacts | int | None = None,
        group: str = "",
        max_points: int = 1000,
    ) -> Comparison:
        """Runs side by side, as the compare page has them (docs/comparing.md); `keys` default to the reward."""
        asks = operations.compare(runs, keys, x, target_reward, baseline, group, max_points, self.retries)
        return self.perform(asks)

    def close(self) -> None:
        """Close its connections; `with Client() as c:` does."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

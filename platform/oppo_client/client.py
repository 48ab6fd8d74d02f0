"""`Client`: submits, finds and compares runs, and manages teams, over the API of OPPO Platform."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from oppo_client.comparison import Comparison
from oppo_client.config import load_config
from oppo_client.messages import delete, get, post
from oppo_client.pagination import fetch_all, iter_pages
from oppo_client.records import Sample, check_filters, parse_sample
from oppo_client.retry import Retries
from oppo_client.run import Run
from oppo_client.run_base import REWARD, RunBase
from oppo_client.series import AXES, check_axis
from oppo_client.spec_source import Changes, Source, fetch_created_run, submit_body
from oppo_client.tables import Table, to_frame
from oppo_client.transport import Session
from oppo_client.validation import COMPARED_PROMPT, COMPARISON, ME, QUEUED, RUN, VALIDATION

COMPARED_SAMPLE_FILTERS = frozenset(
    ["held_out", "sort", "min_score", "max_score", "min_length", "max_length", "ending", "prompt", "q", "excerpt"]
)


class Client:
    """The API of one OPPO Platform. Nothing is cached or requested before the first call.

    Args:
        url, token: default `$OPPO_URL` and `$OPPO_TOKEN`, then the configuration file (`config`).
        retries: number of retries and their delays.

    Raises `ConfigError` without a URL or token. Calls raise `Unreachable` and `ApiError`.
    """

    def __init__(self, url: str | None = None, token: str | None = None, *, retries: Retries | None = None) -> None:
        config = load_config(url, token)
        self.url = config.url
        self._session = Session(config, retries or Retries())

    def __repr__(self) -> str:
        return f"<Client of {self.url}>"

    def me(self) -> dict[str, Any]:
        """User, teams and scope of the token."""
        return self._session.json(get("me"), ME)

    def submit(
        self,
        spec: Source | None = None,
        *,
        yaml: str | None = None,
        project: str | int | None = None,
        overrides: Changes | None = None,
        tags: Iterable[str] = (),
    ) -> Run:
        """Queue a run.

        Args:
            spec: the name of a YAML file, or the spec as a mapping. yaml: the spec as text.
            project: name or number; default: the first project of the token's team.
            overrides: values by dotted path: `{"overlap.overcommit.max": 8, "seed": 2}`. tags: tags of the run.

        Raises `Refused` with one error per invalid field.
        """
        body = submit_body(spec, yaml, project, overrides)
        if given := list(tags):
            body = {**body, "tags": given}  # which older platforms do not know
        return Run(self._session, fetch_created_run(self._session, "runs", body))

    def validate(
        self,
        spec: Source | None = None,
        *,
        yaml: str | None = None,
        project: str | int | None = None,
        overrides: Changes | None = None,
    ) -> dict[str, Any]:
        """Validate a spec without queueing a run: `{"ok", "problems", "spec", "yaml", "chosen", "plan"}`.

        A valid `spec` includes defaults; its `plan` has memory, time, start and saving of the run, None for an invalid one.
        """
        body = submit_body(spec, yaml, project, overrides)
        return self._session.json(post("runs/validate", body, idempotency_key=False), VALIDATION)

    def get(self, run_id: int) -> Run:
        """A run by its number. Raises `NotFound`."""
        return Run(self._session, self._session.json(get(f"runs/{int(run_id)}"), RUN))

    def runs(
        self, filter: str = "", sort: str = "", *, project: str | int = "", state: str | Iterable[str] = ""
    ) -> Iterator[Run]:
        """Runs of your teams, newest first; `filter` and `sort` as on the runs page (docs/runs.md)."""
        states = state if isinstance(state, str) else ",".join(state)
        params = {"filter": filter, "sort": sort, "project": str(project), "state": states}
        return (Run(self._session, summary) for summary in iter_pages(self._session, "runs", params, RUN))

    def queue(self, frame: bool | None = None) -> Any:
        """Your waiting runs in queue order: wait reason, what would start them sooner, estimated start."""
        rows = fetch_all(self._session, "queue", QUEUED)
        names = ("place", "code", "text", "sooner", "estimated_start", "priority")
        columns = {"run": [row["run"]["id"] for row in rows], "name": [row["run"]["name"] for row in rows]}
        return to_frame(Table({**columns, **{name: [row[name] for row in rows] for name in names}}), frame)

    def cluster(self) -> list[dict[str, Any]]:
        """Nodes and their devices (`GET cluster`)."""
        return fetch_all(self._session, "cluster")

    def quotas(self) -> list[dict[str, Any]]:
        """Pools, with the devices that your teams own and borrow (`GET quotas`)."""
        return fetch_all(self._session, "quotas")

    def teams(self) -> list[dict[str, Any]]:
        """Your teams: `{"id", "name", "role", "projects"}`."""
        return fetch_all(self._session, "teams")

    def alerts(
        self, *, open: bool = False, team: int | None = None, run: RunBase | int | None = None, condition: str = ""
    ) -> Iterator[dict[str, Any]]:
        """Alerts of your teams' runs, newest first; `open` omits resolved ones (docs/alerts.md)."""
        params = {"open": open, "team": team, "run": None if run is None else _run_id(run), "condition": condition}
        return iter_pages(self._session, "alerts", params)

    def acknowledge(self, alert: int) -> dict[str, Any]:
        """Acknowledge an alert. Raises `Forbidden` for viewers."""
        return self._session.json(post(f"alerts/{int(alert)}/acknowledge"))

    def audit(self, team: int, *, actor: str = "", action: str = "") -> Iterator[dict[str, Any]]:
        """A team's audit log, newest first; for its owners. Raises `Forbidden`."""
        return iter_pages(self._session, f"teams/{int(team)}/audit", {"actor": actor, "action": action})

    def webhooks(self, team: int) -> list[dict[str, Any]]:
        """A team's alert webhooks; for its owners."""
        return fetch_all(self._session, f"teams/{int(team)}/webhooks")

    def add_webhook(self, team: int, url: str, conditions: Iterable[str], format: str | None = None) -> dict[str, Any]:
        """Post a team's alerts to an https URL, as `json`, `slack` or `discord`; by default the URL's host decides.

        Returns the webhook with its `secret`, which is shown only here.
        """
        body: dict[str, Any] = {"url": url, "conditions": list(conditions)}
        if format is not None:
            body["format"] = format
        return self._session.json(post(f"teams/{int(team)}/webhooks", body))

    def change_webhook(self, team: int, webhook: int, *, on: bool, conditions: Iterable[str]) -> dict[str, Any]:
        """Enable or disable a webhook and set its alert conditions."""
        return self._session.json(post(f"teams/{int(team)}/webhooks/{int(webhook)}", {"on": on, "conditions": list(conditions)}))

    def delete_webhook(self, team: int, webhook: int) -> None:
        """Delete a webhook. It can be restored for a day."""
        self._session.call(delete(f"teams/{int(team)}/webhooks/{int(webhook)}"))

    def restore_webhook(self, team: int, webhook: int) -> dict[str, Any]:
        """Restore a deleted webhook, with its secret."""
        return self._session.json(post(f"teams/{int(team)}/webhooks/{int(webhook)}/restore"))

    def compare(
        self,
        runs: Iterable[RunBase | int],
        *,
        keys: Iterable[str] = (),
        x: str = "step",
        target_reward: float | None = None,
        baseline: RunBase | int | None = None,
        group: str = "",
        max_points: int = 1000,
    ) -> Comparison:
        """Compare runs as on the compare page (docs/comparing.md); `keys` default to the reward."""
        check_axis(x)
        request = get(
            "compare",
            runs=[_run_id(run) for run in runs],
            keys=list(keys) or [REWARD],
            x=AXES[x],
            target=target_reward,
            baseline=None if baseline is None else _run_id(baseline),
            group=group or None,
            max_points=max_points,
        )
        return Comparison(self._session.json(request, COMPARISON), x)

    def compare_samples(
        self, runs: Iterable[RunBase | int], steps: Iterable[int | str] = (), **filters: Any
    ) -> Iterator[list[Sample | None]]:
        """Responses to the same prompt side by side: for each prompt its sample in every column, a step of a run, or None.

        Args:
            runs: at most 12. `sample.raw["run"]` is the run of a sample.
            steps: numbers, `"latest"` and `"common"`; by default first to latest of one run, the latest common step of several.
            filters: `held_out=False` (training prompts), `sort="worst"`, `max_score=…`, `ending=…`, `q="sea"`, …

        Raises `TypeError` for an unknown filter.
        """
        check_filters("compare_samples", filters, COMPARED_SAMPLE_FILTERS)
        chosen = {"runs": [_run_id(run) for run in runs], "steps": list(steps) or None}
        pages = iter_pages(self._session, "compare/samples", {**chosen, **filters}, COMPARED_PROMPT)
        return ([None if row is None else parse_sample(row) for row in prompt["samples"]] for prompt in pages)

    def close(self) -> None:
        """Close the connections; `with Client() as c:` calls it."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _run_id(run: RunBase | int) -> int:
    return run.id if isinstance(run, RunBase) else int(run)

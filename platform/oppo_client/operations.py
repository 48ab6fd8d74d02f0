"""The calls of the API that both clients make, each once (`flow`). Replies are as docs/interfaces.md has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from oppo_client.comparison import REWARD, Comparison
from oppo_client.errors import NoCheckpoint
from oppo_client.pagination import PAGE, log_lines, pages
from oppo_client.records import LogLine, Sample, sample_of
from oppo_client.retry import Retries
from oppo_client.run_base import RunFacts
from oppo_client.sans_io import Feed, Flow, asked, call, delete, get, post
from oppo_client.series import AXES
from oppo_client.tables import Table
from oppo_client.timeline import Timeline
from oppo_client.validation import CHECKPOINT, COMPARISON, FIGURE, ME, QUEUED, RUN, SAMPLE, TIMELINE, Shape, page_of

SAMPLE_FILTERS = frozenset(
    [f"{end}_{name}" for end in ("min", "max") for name in ("score", "age")]
    + ["step", "from_step", "to_step", "ending", "held_out", "prompt", "q", "sort", "excerpt"]
)
STREAMS = ("stdout", "stderr", "supervisor", "platform")


def me(retries: Retries) -> Flow[dict[str, Any]]:
    """Who the token stands for."""
    return asked(get("me"), retries, ME)


def show(run_id: int, retries: Retries) -> Flow[dict[str, Any]]:
    """A run's summary."""
    return asked(get(f"runs/{int(run_id)}"), retries, RUN)


def act(run_id: int, deed: str, body: Mapping[str, Any] | None, retries: Retries) -> Flow[dict[str, Any]]:
    """A run's summary after something was asked of it: `pause`, `tags`, …"""
    return asked(post(f"runs/{int(run_id)}/{deed}", body), retries, RUN)


def remove(run_id: int, retries: Retries) -> Flow[dict[str, Any]]:
    """Into the trash; the reply tells until when it can be restored."""
    return asked(delete(f"runs/{int(run_id)}"), retries)


def runs(filter: str, sort: str, project: str, state: str | Iterable[str], retries: Retries) -> Feed[dict[str, Any]]:
    """Summaries of runs, page by page."""
    states = state if isinstance(state, str) else ",".join(state)
    params = {"filter": filter, "sort": sort, "project": project, "state": states}
    return pages("runs", {name: value for name, value in params.items() if value}, RUN, dict, retries)


def samples(run_id: int, wanted: Mapping[str, Any], retries: Retries) -> Feed[Sample]:
    """Recorded answers, page by page. Raises `TypeError` for a condition that there is not."""
    unknown = set(wanted) - SAMPLE_FILTERS
    if unknown:
        raise TypeError(f"samples() has no filter {', '.join(sorted(unknown))}; filters are {', '.join(sorted(SAMPLE_FILTERS))}")
    return pages(f"runs/{int(run_id)}/samples", wanted, SAMPLE, sample_of, retries)


def logs(run_id: int, tail: int | None, follow: bool, stream: str | None, q: str, retries: Retries) -> Feed[LogLine]:
    """Log lines. Raises `ValueError` for a stream that there is not."""
    if stream is not None and stream not in STREAMS:
        raise ValueError(f"stream is {stream!r}; must be one of {', '.join(STREAMS)}")
    wanted = {name: value for name, value in (("stream", stream), ("q", q)) if value}
    return log_lines(run_id, tail, follow, wanted, retries)


def events(run_id: int, kinds: Iterable[str], q: str, retries: Retries) -> Feed[dict[str, Any]]:
    """What befell a run, newest first, page by page."""
    wanted = {"kinds": ",".join(kinds), "q": q}
    return pages(f"runs/{int(run_id)}/events", {name: value for name, value in wanted.items() if value}, dict, dict, retries)


def items(path: str, retries: Retries, shape: Shape = dict) -> Flow[list[dict[str, Any]]]:
    """Every item of a listing at once, however many pages it has."""
    found: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = yield from asked(get(path, limit=PAGE, cursor=cursor), retries, page_of(shape))
        found += page["items"]
        cursor = page["next"]
        if cursor is None:
            return found


def alerts(open: bool, team: int | None, run: RunFacts | int | None, condition: str, retries: Retries) -> Feed[dict[str, Any]]:
    """Alerts, newest first, page by page."""
    wanted = {"open": open, "team": team, "run": None if run is None else id_of(run), "condition": condition or None}
    return pages("alerts", {name: value for name, value in wanted.items() if value is not None}, dict, dict, retries)


def audit(team: int, actor: str, action: str, retries: Retries) -> Feed[dict[str, Any]]:
    """Entries of a team's audit log, newest first, page by page."""
    wanted = {"actor": actor, "action": action}
    return pages(f"teams/{int(team)}/audit", {name: value for name, value in wanted.items() if value}, dict, dict, retries)


def add_webhook(team: int, url: str, conditions: Iterable[str], retries: Retries) -> Flow[dict[str, Any]]:
    """The new webhook with its secret."""
    return asked(post(f"teams/{int(team)}/webhooks", {"url": url, "conditions": list(conditions)}), retries)


def change_webhook(team: int, webhook: int, on: bool, conditions: Iterable[str], retries: Retries) -> Flow[dict[str, Any]]:
    """The webhook, as it is now."""
    return asked(post(f"teams/{int(team)}/webhooks/{int(webhook)}", {"on": on, "conditions": list(conditions)}), retries)


def remove_webhook(team: int, webhook: int, retries: Retries) -> Flow[None]:
    """No reply."""
    return asked(delete(f"teams/{int(team)}/webhooks/{int(webhook)}"), retries, dict | None)


def checkpoints(run_id: int, retries: Retries) -> Flow[list[dict[str, Any]]]:
    """What is registered of a run, newest step first."""
    return items(f"runs/{int(run_id)}/checkpoints", retries, CHECKPOINT)


def text(path: str, retries: Retries, **params: Any) -> Flow[str]:
    """A reply as text."""
    reply = yield from call(get(path, **params), retries)
    return reply.content.decode("utf-8", "replace")


def queue(retries: Retries) -> Flow[Table]:
    """Your waiting runs, a row each, in their order: why they wait, and what would start them sooner."""
    found = yield from items("queue", retries, QUEUED)
    names = ("place", "code", "text", "sooner", "estimated_start", "priority")
    columns = {"run": [item["run"]["id"] for item in found], "name": [item["run"]["name"] for item in found]}
    return Table({**columns, **{name: [item[name] for item in found] for name in names}})


def timeline(run_id: int, steps: range | Iterable[int] | None, theme: str, retries: Retries) -> Flow[Timeline]:
    """The newest steps, or those from the first to the last of `steps`."""
    bounds = {} if steps is None else _ends(steps)
    told = yield from asked(get(f"runs/{int(run_id)}/timeline", **bounds), retries, TIMELINE)
    figure = yield from asked(get(f"runs/{int(run_id)}/timeline/figure", **bounds, theme=theme), retries, FIGURE)
    return Timeline(run_id, told, figure)


def trace(run_id: int, steps: range | Iterable[int], retries: Retries) -> Flow[str]:
    """Steps as Chrome trace JSON."""
    return text(f"runs/{int(run_id)}/trace.json", retries, **_ends(steps))


def _ends(steps: range | Iterable[int]) -> dict[str, int]:
    wanted = list(steps)
    if not wanted:
        raise ValueError("steps is empty")
    return {"from_step": min(wanted), "to_step": max(wanted)}


def compare(
    runs: Iterable[RunFacts | int],
    keys: Iterable[str],
    x: str,
    target_reward: float | None,
    baseline: RunFacts | int | None,
    group: str,
    max_points: int,
    retries: Retries,
) -> Flow[Comparison]:
    """Runs side by side. Raises `ValueError` for another axis."""
    if x not in AXES:
        raise ValueError(f"x is {x!r}; must be one of {', '.join(AXES)}")
    told = yield from asked(
        get(
            "compare",
            runs=[id_of(run) for run in runs],
            keys=list(keys) or [REWARD],
            x=AXES[x],
            target=target_reward,
            baseline=None if baseline is None else id_of(baseline),
            group=group or None,
            max_points=max_points,
        ),
        retries,
        COMPARISON,
    )
    return Comparison(told, x)


def id_of(run: RunFacts | int) -> int:
    """A run's number."""
    return run.id if isinstance(run, RunFacts) else int(run)


def checkpoint(run_id: int, which: str | int, retries: Retries) -> Flow[dict[str, Any]]:
    """A checkpoint by step or name, or the newest one (`latest`). Raises `NoCheckpoint`, which says which there are."""
    found = yield from checkpoints(run_id, retries)
    if which == "latest":
        chosen = next((told for told in found if told["files"] != "deleted"), None)
    else:
        chosen = next((told for told in found if which in (told["step"], told["name"])), None)
    if chosen is None:
        there = ", ".join(str(told["step"]) for told in found) or "none"
        raise NoCheckpoint(f"Run {run_id} has no checkpoint {which}; available steps: {there}.")
    return chosen

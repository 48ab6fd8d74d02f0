"""The MLflow tracker: a run on an MLflow server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from hashlib import blake2s
from typing import Any, TypeVar
from urllib.parse import urlsplit

from oppo_core.trackers.config import TrackerConfig, commit, flatten
from oppo_core.trackers.cursor import Cursor
from oppo_core.trackers.protocol import Log, RefusedError, Samples, Step

# Short timeouts without retries, because `Delivery` retries; no redirects to servers that are not allowed; no telemetry.
VARIABLES = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}  # fmt: skip
MOST_METRICS, MOST_PARAMS, LONGEST_VALUE, LONGEST_TAG = 1000, 100, 6000, 5000
STATUS = {"succeeded": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
RUN_TAG, STEP_TAG = "oppo.run", "oppo.step"
MAX_ERROR_CHARS = 400
# Error codes for data that a server will never accept.
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
LONGEST = 250
# Refused characters. Older servers, and those on Windows, also refuse the colon (`busy/cpu:0`).
WIDE = re.compile(r"[^\w/.: -]")
NARROW = re.compile(r"[^A-Za-z0-9_/. -]")
DIGITS = 6
Item = TypeVar("Item")


class Mlflow:
    """A run on an MLflow server, identified by the tag `oppo.run`.

    MLflow cannot delete logged values, so steps that are trained again are not sent again. The tag `oppo.step`, sent with the
    metrics of each step, is the last step on the server.
    """

    rewrites = False

    def __init__(self, config: TrackerConfig, cursor: Cursor, log: Log) -> None:
        uri, user = config.settings["uri"], config.settings["username"]
        os.environ |= VARIABLES | ({"MLFLOW_TRACKING_USERNAME": user} if user is not None else {})
        from mlflow import entities, exceptions, tracking

        self._entities, self._error = entities, exceptions.MlflowException
        self._client = tracking.MlflowClient(tracking_uri=uri)
        run = self._find_run(config, cursor) or self._create_run(config, cursor)
        self._run = run.info.run_id
        logged = int(run.data.tags.get(STEP_TAG, 0))
        if logged > cursor.step:
            cursor.step = cursor.settled = logged
        self._client.set_tag(self._run, "oppo.commit", commit() or "unknown")
        self._refused = WIDE
        self._last = Step(cursor.step, 0.0, {})
        try:
            self._send(lambda: self._log_params(flatten(config.spec), run.data.params))
        except RefusedError as error:
            log(f"it refused part of the spec: {' '.join(str(error).split())[:MAX_ERROR_CHARS]}")
        self._logs_samples = _is_proxied(run.info.artifact_uri, uri)
        if not self._logs_samples:
            log(f"samples are not sent: its artifacts go to {run.info.artifact_uri}, not through the server.")

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment is not None else self._client.create_experiment(name))

    def _find_run(self, config: TrackerConfig, cursor: Cursor) -> Any:
        experiment = self._experiment(config.settings["experiment"])
        runs = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{cursor.run}'", max_results=1)
        if runs:
            self._client.update_run(runs[0].info.run_id, status="RUNNING")
        return runs[0] if runs else None

    def _create_run(self, config: TrackerConfig, cursor: Cursor) -> Any:
        tags = {RUN_TAG: cursor.run, "mlflow.source.name": "oppo", "mlflow.source.git.commit": commit() or "unknown"}
        return self._client.create_run(self._experiment(config.settings["experiment"]), run_name=config.name, tags=tags)

    def _log_params(self, spec: dict[str, Any], known: dict[str, str]) -> None:
        """Log the spec as params. Params are immutable, so a resumed run's changes become tags `changed.…`."""
        texts = {valid_name(key, self._refused): str(value)[:LONGEST_VALUE] for key, value in spec.items()}
        for batch in batched([self._entities.Param(key, text) for key, text in texts.items() if key not in known], MOST_PARAMS):
            self._client.log_batch(self._run, params=batch)
        changed = {key: text for key, text in texts.items() if key in known and known[key] != text}
        tags = [self._entities.RunTag(f"changed.{key}"[:LONGEST], text[:LONGEST_TAG]) for key, text in changed.items()]
        for tag_batch in batched(tags, MOST_PARAMS):
            self._client.log_batch(self._run, tags=tag_batch)

    def log_steps(self, steps: list[Step]) -> None:
        self._send(lambda: self._log(steps))
        self._last = steps[-1]

    def _log(self, steps: list[Step]) -> None:
        points = [
            self._entities.Metric(valid_name(key, self._refused), value, int(1000 * step.time), step.number)
            for step in steps
            for key, value in step.metrics.items()
            if step.number > self._last.number or repr(value) != repr(self._last.metrics.get(key))
        ]
        for batch in batched(points, MOST_METRICS):
            self._client.log_batch(self._run, metrics=batch, tags=[self._entities.RunTag(STEP_TAG, str(batch[-1].step))])

    def _send(self, send: Callable[[], None]) -> None:
        """Send; if refused, once more with fewer characters allowed in names, from then on. Raises RefusedError."""
        previous = self._refused
        for self._refused in dict.fromkeys((previous, NARROW)):
            try:
                return send()
            except self._error as error:
                if error.error_code not in REFUSALS:
                    raise
                refusal = error
        self._refused = previous  # names were not the reason
        raise RefusedError(str(refusal)) from refusal

    def log_samples(self, samples: Samples) -> None:
        """Write a JSON artifact per step."""
        if self._logs_samples:
            self._client.log_dict(self._run, {samples.kind: samples.rows}, f"{samples.kind}/step-{samples.step:08d}.json")

    def close(self, outcome: str) -> None:
        self._client.set_terminated(self._run, STATUS[outcome])


def valid_name(name: str, refused: re.Pattern[str] = WIDE) -> str:
    """The name itself if valid; otherwise refused characters become `_`, and six digits of the name's digest are appended, which
    keeps names distinct and equal between attempts.

    MLflow treats names as paths: they may not begin or end with a slash, nor have parts that are empty, `.` or `..`.
    """
    parts = (part if part.strip(".") else "_" * len(part) for part in refused.sub("_", name).split("/") if part)
    plain = re.sub(r"^\.\.", "__", "/".join(parts)) or "_"
    if plain == name and len(name) <= LONGEST:
        return name
    digest = blake2s(name.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
    return f"{plain[: LONGEST - DIGITS - 1].rstrip('/')}-{digest}"


def batched(items: list[Item], most: int) -> Iterator[list[Item]]:
    """`items` in lists of at most `most`."""
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _is_proxied(place: str, uri: str) -> bool:
    """Whether the server proxies artifacts; other hosts and local paths are not allowed."""
    given = urlsplit(place)
    return given.scheme == "mlflow-artifacts" and given.netloc in ("", urlsplit(uri).netloc)


TRACKER = Mlflow

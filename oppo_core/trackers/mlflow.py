"""MLflow: a run on a server, spoken to by MLflow's own client."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

from oppo_core.trackers.config import TrackerConfig, commit, flat
from oppo_core.trackers.cursor import Cursor
from oppo_core.trackers.metric_names import LONGEST, NARROW, WIDE, allowed_name
from oppo_core.trackers.protocol import RefusedError, Samples, Say, Step

# It waits less and tries again less often than it likes to, because we do that; it stays with the server that was allowed, and
# tells nobody else that it is used.
VARIABLES = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}  # fmt: skip
MOST_METRICS, MOST_PARAMS, LONGEST_VALUE, LONGEST_TAG = 1000, 100, 6000, 5000
STATUS = {"succeeded": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
RUN_TAG, STEP_TAG = "oppo.run", "oppo.step"
SAID_LENGTH = 400
# What a server answers to data that it will never take.
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
Item = TypeVar("Item")


class Mlflow:
    """A run of an MLflow server, found again by the tag `oppo.run`.

    What was told cannot be taken back there, so steps that are trained again are left alone: the tag `oppo.step`, which
    comes with the metrics of each step, says how far the server has them. A value that is sent again is kept beside the former.
    """

    rewrites = False

    def __init__(self, config: TrackerConfig, cursor: Cursor, say: Say) -> None:
        uri, user = config.settings["uri"], config.settings["username"]
        os.environ |= VARIABLES | ({"MLFLOW_TRACKING_USERNAME": user} if user is not None else {})
        from mlflow import entities, exceptions, tracking

        self._entities, self._error = entities, exceptions.MlflowException
        self._client = tracking.MlflowClient(tracking_uri=uri)
        run = self._found(config, cursor) or self._made(config, cursor)
        self._run = run.info.run_id
        told = int(run.data.tags.get(STEP_TAG, 0))
        if told > cursor.step:
            cursor.step = cursor.settled = told
        self._client.set_tag(self._run, "oppo.commit", commit() or "unknown")
        self._spelling = WIDE
        self._last = Step(cursor.step, 0.0, {})
        try:
            self._accepted(lambda: self._introduce(flat(config.spec), run.data.params))
        except RefusedError as error:  # steps are worth more than settings
            say(f"it does not take all of the spec: {' '.join(str(error).split())[:SAID_LENGTH]}")
        self._shows = _artifacts_go_to_the_server(run.info.artifact_uri, uri)
        if not self._shows:
            say(f"answers are not told to it: they would go to {run.info.artifact_uri}, not through the server.")

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _found(self, config: TrackerConfig, cursor: Cursor) -> Any:
        experiment = self._experiment(config.settings["experiment"])
        runs = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{cursor.run}'", max_results=1)
        if runs:
            self._client.update_run(runs[0].info.run_id, status="RUNNING")
        return runs[0] if runs else None

    def _made(self, config: TrackerConfig, cursor: Cursor) -> Any:
        tags = {RUN_TAG: cursor.run, "mlflow.source.name": "oppo", "mlflow.source.git.commit": commit() or "unknown"}
        return self._client.create_run(self._experiment(config.settings["experiment"]), run_name=config.name, tags=tags)

    def _introduce(self, spec: dict[str, Any], known: dict[str, str]) -> None:
        """The spec as params. They never change there: what a resumed run has otherwise becomes a tag `changed.…`."""
        texts = {allowed_name(key, self._spelling): str(value)[:LONGEST_VALUE] for key, value in spec.items()}
        for part in parts([self._entities.Param(key, text) for key, text in texts.items() if key not in known], MOST_PARAMS):
            self._client.log_batch(self._run, params=part)
        changed = {key: text for key, text in texts.items() if key in known and known[key] != text}
        tags = [self._entities.RunTag(f"changed.{key}"[:LONGEST], text[:LONGEST_TAG]) for key, text in changed.items()]
        for tags_part in parts(tags, MOST_PARAMS):
            self._client.log_batch(self._run, tags=tags_part)

    def log_steps(self, steps: list[Step]) -> None:
        """As few calls as the server allows. A point that is sent twice is there once."""
        self._accepted(lambda: self._log(steps))
        self._last = steps[-1]

    def _log(self, steps: list[Step]) -> None:
        points = [
            self._entities.Metric(allowed_name(key, self._spelling), value, int(1000 * step.time), step.number)
            for step in steps
            for key, value in step.metrics.items()
            if step.number > self._last.number or repr(value) != repr(self._last.metrics.get(key))
        ]
        for part in parts(points, MOST_METRICS):
            self._client.log_batch(self._run, metrics=part, tags=[self._entities.RunTag(STEP_TAG, str(part[-1].step))])

    def _accepted(self, send: Callable[[], None]) -> None:
        """Send; where that is refused once more with fewer characters in names, which then stay. Raises RefusedError."""
        spelling = self._spelling
        for self._spelling in dict.fromkeys((spelling, NARROW)):
            try:
                return send()
            except self._error as error:
                if error.error_code not in REFUSALS:
                    raise
                refused = error
        self._spelling = spelling  # it was not the names
        raise RefusedError(str(refused)) from refused

    def log_samples(self, samples: Samples) -> None:
        """A file a step among the run's artifacts."""
        if self._shows:
            self._client.log_dict(self._run, {samples.kind: samples.rows}, f"{samples.kind}/step-{samples.step:08d}.json")

    def close(self, outcome: str) -> None:
        """Its status says how it ended."""
        self._client.set_terminated(self._run, STATUS[outcome])


def parts(items: list[Item], most: int) -> Iterator[list[Item]]:
    """`items` in lists of at most so many."""
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _artifacts_go_to_the_server(place: str, uri: str) -> bool:
    """Anything else, another host or a path of this machine, was not allowed: the server must pass them on."""
    given = urlsplit(place)
    return given.scheme == "mlflow-artifacts" and given.netloc in ("", urlsplit(uri).netloc)


TRACKER = Mlflow

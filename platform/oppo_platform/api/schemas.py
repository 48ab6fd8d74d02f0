"""What operations answer, where the function's own annotation does not say it: the schemas of the API's description.

They describe and do not convert: a reply is what the selectors returned, checked against these by the tests of the description
(tests/web/test_api_description.py) and not again for every request.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from oppo_contract.events import Sample
from oppo_contract.wire import Wire
from oppo_platform.runs.checkpoints import Files
from oppo_platform.runs.saved_views import ViewItem
from oppo_platform.runs.selectors import RunSummary
from oppo_platform.storage.selectors import TeamTaken
from oppo_platform.storage.trash import Trashed
from oppo_platform.telemetry.grouping import Group
from oppo_platform.telemetry.logs import Stream
from oppo_platform.telemetry.run_events import Kind
from oppo_platform.telemetry.selectors import Column

Figures = dict[str, float | None]


class Problem(TypedDict):
    """Why a request was not fulfilled (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[SpecComplaint]
    request_id: str | None
    term: NotRequired[str]


class SpecComplaint(TypedDict):
    """One thing that is wrong: where (a dotted path), what was given, what is allowed, and what may have been meant."""

    path: str
    message: str
    value: NotRequired[str]
    allowed: NotRequired[str]
    suggestion: NotRequired[str]


class Validated(TypedDict):
    """A spec that was looked at: with every default when it is fine, otherwise as it was given."""

    ok: bool
    problems: list[SpecComplaint]
    spec: dict[str, Any] | None
    yaml: str | None


class DecisionItem(TypedDict):
    """What a controller decided."""

    id: int
    step: int
    controller: str
    old: float | None
    new: float | None
    reason: str


class Decisions(TypedDict):
    """In the order of steps, a page of them."""

    items: list[DecisionItem]
    next: str | None


class ConfigDifference(TypedDict):
    """A setting in which runs differ, as text by run id."""

    path: str
    values: dict[str, str]


class Comparison(TypedDict):
    """Runs side by side; keys of the mappings are run ids."""

    runs: list[RunSummary]
    series: dict[str, dict[str, Column]]
    target: float | None
    time_to_target: dict[str, Figures | None]
    baseline: int
    speedup: Figures
    groups: list[Group]
    config_diff: list[ConfigDifference]
    figures: dict[str, Figures]
    counted: dict[str, list[float | None]]


class Field(TypedDict):
    """Something that a filter can ask for."""

    name: str
    kind: Literal["text", "number"]
    says: str


class TableColumn(TypedDict):
    """Something that the table can show."""

    name: str
    title: str
    says: str


class Words(TypedDict):
    """What a filter of runs can be made of."""

    fields: list[Field]
    values: dict[str, list[str]]
    metrics: list[str]
    settings: list[str]
    columns: list[TableColumn]


class Pinned(TypedDict):
    """One run a project at most, a page of them."""

    items: list[RunSummary]
    next: str | None


class SampleItem(Sample):
    """A recorded answer; with `excerpt` its texts are cut, and `stale_response` is left out."""

    id: int
    step: int
    prompt_key: str
    stale_response: str = ""


class SampleList(Wire):
    """One page; `next` is the `cursor` of the following one."""

    items: list[SampleItem]
    next: str | None


class SameSample(TypedDict):
    """The figures of another answer to the same prompt."""

    id: int
    step: int
    score: float | None
    kl: float | None
    length: int | None
    age: int | None
    held_out: bool


class OneSample(SampleItem):
    """An answer, and all answers to its prompt."""

    same_prompt: list[SameSample]


class WorstBubble(TypedDict):
    """One of the ten longest stretches in which a device was idle; seconds."""

    device: str
    cause: str
    step: int
    start_s: float
    length_s: float
    words: str


class Timeline(TypedDict):
    """Steps as spans (docs/interfaces.md); `far`: neighbouring steps are merged."""

    lanes: list[list[str]]
    devices: list[str]
    first_step: int | None
    last_step: int | None
    far: bool
    steps: list[dict[str, Any]]
    worst: list[WorstBubble]


class Figure(TypedDict):
    """A Plotly figure."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]


class LogLineItem(TypedDict):
    """A line of a log; its text is untrusted."""

    id: int
    attempt: int
    stream: Stream
    text: str
    time: str


class Logs(TypedDict):
    """Lines in the order in which they arrived; `next` is the `after` of the following call. `ended`: the run writes no more."""

    lines: list[LogLineItem]
    next: int
    earlier: bool | None
    ended: bool


class CheckpointItem(TypedDict):
    """A registered checkpoint."""

    id: int
    step: int
    name: str
    attempt: int
    node: str
    bytes: int
    manifest_sha256: str
    registered_at: str
    files: Files
    resumes: bool


class Checkpoints(TypedDict):
    """Newest step first, a page of them."""

    items: list[CheckpointItem]
    next: str | None


class HistoryItem(TypedDict):
    """Something that befell a run."""

    kind: Kind
    id: int
    at: str | None
    step: int | None
    what: str
    old: str | float | None
    new: str | float | None
    text: str
    actor: str


class History(TypedDict):
    """One page, newest first."""

    items: list[HistoryItem]
    next: str | None


class Views(TypedDict):
    """Saved views by name, a page of them."""

    items: list[ViewItem]
    next: str | None


class DefaultView(TypedDict):
    """What the table begins with; null: all runs."""

    view: int | None


class DeletedView(TypedDict):
    """Which view is gone."""

    id: int


class Storage(TypedDict):
    """What teams' runs take, a page of teams."""

    items: list[TeamTaken]
    next: str | None


class Trash(TypedDict):
    """Deleted runs, the newest deletion first; a page of them."""

    items: list[Trashed]
    next: str | None


class Unread(TypedDict):
    """How many alerts are news; 100 stands for more than 99."""

    unread: int


# By the name of the operation's function.
REPLIES: dict[str, Any] = {
    "validate": Validated, "decisions": Decisions, "compare_runs": Comparison, "filter_words": Words, "pinned": Pinned,
    "list_samples": SampleList, "show_sample": OneSample, "timeline": Timeline, "figure": Figure, "show_logs": Logs,
    "list_checkpoints": Checkpoints, "show_events": History, "views": Views, "save": ViewItem, "set_default": DefaultView,
    "change": ViewItem, "delete_view": DeletedView, "restore_view": ViewItem, "list_storage": Storage, "list_trash": Trash,
    "unread": Unread, "seen": Unread,
}  # fmt: skip
# Those that answer with something else than JSON.
FILES: dict[str, str] = {
    "spec": "application/yaml", "download_trace": "application/json", "download_logs": "text/plain",
    "download_metrics": "application/x-ndjson",
    "download": "application/x-tar",
}  # fmt: skip

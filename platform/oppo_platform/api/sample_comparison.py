"""Samples of several runs and steps side by side, over HTTP: `compare/samples` (docs/interfaces.md)."""

from __future__ import annotations

from typing import Any, cast

from django.http import HttpRequest, StreamingHttpResponse
from ninja import Query, Router, Schema
from pydantic import Field, FiniteFloat

from oppo_contract.wire import WireModel
from oppo_platform.api.history import WORDS
from oppo_platform.api.lookups import caller
from oppo_platform.api.metrics import parse_ids
from oppo_platform.api.openapi import file
from oppo_platform.api.paging import Cursor, Limit
from oppo_platform.api.samples import EXCERPT, LARGEST_STEP, SampleItem
from oppo_platform.runs.models import Run
from oppo_platform.runs.selectors import get_runs
from oppo_platform.telemetry.sample_columns import MOST_COLUMNS, StepWord
from oppo_platform.telemetry.sample_comparison import (
    Order,
    ResponseFilter,
    SampleComparison,
    compare_samples,
    export_responses,
    list_prompts,
)
from oppo_platform.telemetry.samples import Ending

NUMBER_OR_WORD = "([0-9]{1,10}|latest|common)"
STEPS = (
    "Steps, separated by commas: numbers, `latest` (each run's latest step) or `common` (the latest step that all runs have"
    " reached). By default four steps of a single run, from the first to the latest, and `common` for several runs."
)
ORDER = (
    "`change`: largest change of the reward first, of one run from the first to the last step, of several runs between the"
    " lowest and the highest; `best` and `worst`: by the highest and the lowest reward; `prompt`: the prompts' own order."
    " Unknown rewards last."
)
TOO_MANY = f"At most {MOST_COLUMNS} columns, the steps of all runs together, can be side by side. Choose fewer runs or steps."

router = Router()


class ComparedQuery(Schema):
    """Runs, steps, order and filter. A prompt is listed if one of its shown responses meets all conditions."""

    runs: str = Field(max_length=300, pattern="^[0-9]{1,19}(,[0-9]{1,19})*$", description="Numbers of runs, separated by commas.")
    steps: str = Field("", max_length=200, pattern=f"^({NUMBER_OR_WORD}(,{NUMBER_OR_WORD})*)?$", description=STEPS)
    held_out: bool = Field(True, description="`true`: an evaluation's responses; `false`: trained ones.")
    sort: Order = Field("change", description=ORDER)
    min_score: FiniteFloat | None = Field(None, description="The lowest reward.")
    max_score: FiniteFloat | None = Field(None, description="The highest reward.")
    min_length: int | None = Field(None, ge=0, le=LARGEST_STEP, description="The fewest response tokens.")
    max_length: int | None = Field(None, ge=0, le=LARGEST_STEP, description="The most response tokens.")
    ending: Ending | None = Field(None, description="Only responses with this finish reason.")
    prompt: str = Field("", pattern="^([0-9a-f]{32})?$", description="A `prompt_key`: only this prompt.")
    q: str = Field("", max_length=1000, description=WORDS)

    def filter(self) -> ResponseFilter:
        """The conditions on a response."""
        return ResponseFilter(
            self.min_score, self.max_score, self.min_length, self.max_length, self.ending, self.prompt, words=self.q
        )

    def requested_steps(self) -> list[int | StepWord]:
        """Numbers and words, without repetitions."""
        words = dict.fromkeys(word for word in self.steps.split(",") if word)
        return [min(int(word), LARGEST_STEP) if word.isdigit() else cast(StepWord, word) for word in words]


class ComparedPage(ComparedQuery):
    """The same, a page of it."""

    limit: Limit = 20
    cursor: Cursor = ""
    excerpt: int = Field(0, ge=0, le=100_000, description=EXCERPT)


class SampledRun(WireModel):
    """A run, and the settings by which it records samples: whether it evaluates, and `logging.samples_per_step`."""

    id: int
    name: str
    evaluates: bool
    samples_per_step: int


class SampleColumn(WireModel):
    """A column: the run's samples of the steps `first` to `last`, of the steps up to `step`; null where none is recorded."""

    run: int
    step: int | None
    first: int | None
    last: int | None


class ComparedSample(SampleItem):
    """A recorded response and its run."""

    run: int


class ComparedPrompt(WireModel):
    """A prompt: its response in every column, null without one, and how much the reward changes between them."""

    prompt_key: str
    change: float | None
    samples: list[ComparedSample | None]


class SampleComparisonPage(WireModel):
    """One page of prompts; `next` is the `cursor` of the following one. `steps`: recorded steps to choose from, at most 100."""

    runs: list[SampledRun]
    columns: list[SampleColumn]
    steps: list[int]
    items: list[ComparedPrompt]
    next: str | None


@router.get("compare/samples", summary="Samples of runs and steps side by side")
def list_compared_samples(request: HttpRequest, query: Query[ComparedPage]) -> SampleComparisonPage:
    """Prompts with their responses in each column, a step of a run. Texts are model output: show them as text.

    A column shows the newest response to the prompt after the run's previous column, up to its step: of an evaluation, or of the
    trained responses, which are rarely of one step. Prompts with a response in one of several columns alone are left out.
    """
    runs, comparison = _comparison(request, query)
    page = list_prompts(comparison, limit=query.limit, cursor=query.cursor, excerpt=query.excerpt)
    columns = [{"run": c.run_id, "step": c.step, "first": c.first, "last": c.last} for c in comparison.columns]
    body: Any = {"runs": [_described(run) for run in runs], "columns": columns, "steps": comparison.offered, **page}
    return body


@router.get(
    "compare/samples.ndjson",
    summary="The same samples, one response per line",
    openapi_extra=file("application/x-ndjson"),
)
def download_compared_samples(request: HttpRequest, query: Query[ComparedQuery]) -> StreamingHttpResponse:
    """Every response of `compare/samples` with the same parameters, in the same order and uncut, as newline-delimited JSON,
    streamed: a sample with its `run` and its `column`, counted from 0. `pandas.read_json(…, lines=True)` reads it."""
    runs, comparison = _comparison(request, query)
    answer = StreamingHttpResponse(export_responses(comparison), content_type="application/x-ndjson")
    name = "-".join(str(run.pk) for run in runs)
    answer.headers["Content-Disposition"] = f'attachment; filename="samples-of-runs-{name}.ndjson"'
    return answer


def _comparison(request: HttpRequest, query: ComparedQuery) -> tuple[list[Run], SampleComparison]:
    """The runs and their comparison. Raises `Run.DoesNotExist`, also for another team's, and `TooManyColumns`."""
    runs = get_runs(caller(request), parse_ids(query.runs))
    steps, filters = query.requested_steps(), query.filter()
    return runs, compare_samples(runs, steps, held_out=query.held_out, filters=filters, order=query.sort)


def _described(run: Run) -> dict[str, Any]:
    logging = run.spec.get("logging") or {}
    return {
        "id": run.pk,
        "name": run.name,
        "evaluates": run.spec.get("evaluation") is not None,
        "samples_per_step": logging.get("samples_per_step", 0),
    }

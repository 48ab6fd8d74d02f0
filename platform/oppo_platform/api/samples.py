"""Recorded answers over HTTP: `runs/{id}/samples` (docs/interfaces.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpRequest
from ninja import Path, Query, Router, Schema
from pydantic import Field, FiniteFloat
from typing_extensions import TypedDict

from oppo_contract.events import Sample
from oppo_contract.wire import WireModel
from oppo_platform.api.history import WORDS
from oppo_platform.api.lookups import LARGEST_ID, RunId, get_run_row
from oppo_platform.api.paging import Cursor, Limit
from oppo_platform.telemetry.models import SampleRow
from oppo_platform.telemetry.samples import Ending, SampleFilter, sample, samples

LARGEST_STEP = 2**31 - 1
Sort = Literal[
    "step",
    "-step",
    "score",
    "-score",
    "kl",
    "-kl",
    "length",
    "-length",
    "age",
    "-age",
    "version",
    "-version",
    "ending",
    "-ending",
]

router = Router()
SampleId = Annotated[int, Path(description="The answer's number, from the run's list of samples.")]
EXCERPT = "Cuts prompt and answer to about this many characters, from shortly before the first match; 0: uncut."
EXCERPT_START = (
    "With `excerpt`: the place in the response, in characters, where its excerpt starts; null if the response is whole."
)


class SampleQuery(Schema):
    """Filters and order; the page's query parameters have the same names."""

    step: int | None = Field(None, ge=0, le=LARGEST_STEP, description="Only answers of this PPO step.")
    from_step: int | None = Field(None, ge=0, le=LARGEST_STEP, description="Only answers of this PPO step and later ones.")
    to_step: int | None = Field(None, ge=0, le=LARGEST_STEP, description="Only answers of this PPO step and earlier ones.")
    min_score: FiniteFloat | None = Field(None, description="The lowest reward.")
    max_score: FiniteFloat | None = Field(None, description="The highest reward.")
    min_length: int | None = Field(None, ge=0, le=LARGEST_STEP, description="The fewest response tokens.")
    max_length: int | None = Field(None, ge=0, le=LARGEST_STEP, description="The most response tokens.")
    min_age: int | None = Field(None, ge=0, le=LARGEST_STEP, description="The fewest PPO steps for which it was deferred.")
    max_age: int | None = Field(None, ge=0, le=LARGEST_STEP, description="The most PPO steps for which it was deferred.")
    ending: Ending | None = Field(None, description="Only answers with this ending.")
    held_out: bool | None = Field(None, description="`true`: only an evaluation's answers; `false`: only trained ones.")
    prompt: str = Field("", pattern="^([0-9a-f]{32})?$", description="A `prompt_key`: only answers to this prompt.")
    q: str = Field("", max_length=1000, description=WORDS)
    sort: Sort = Field("-step", description="The order; with a leading `-` descending. Unknown values rank lowest.")
    limit: Limit = 20
    cursor: Cursor = ""
    excerpt: int = Field(0, ge=0, le=100_000, description=EXCERPT)

    def filter(self) -> SampleFilter:
        """The filter; `step` sets both bounds."""
        return SampleFilter(
            from_step=self.from_step if self.step is None else self.step,
            to_step=self.to_step if self.step is None else self.step,
            min_score=self.min_score,
            max_score=self.max_score,
            min_length=self.min_length,
            max_length=self.max_length,
            min_age=self.min_age,
            max_age=self.max_age,
            ending=self.ending,
            held_out=self.held_out,
            prompt=self.prompt,
            words=self.q,
        )


class SampleItem(Sample):
    """A recorded answer; with `excerpt` its texts are cut, and `stale_response` and `messages` are left out."""

    id: int
    step: int
    prompt_key: str
    stale_response: str = ""
    excerpt_start: int | None = Field(None, description=EXCERPT_START)


class SampleList(WireModel):
    """One page; `next` is the `cursor` of the following one."""

    items: list[SampleItem]
    next: str | None


class SameSample(TypedDict):
    """Figures of another answer to the same prompt."""

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


@router.get("runs/{int:run_id}/samples", summary="Recorded samples")
def list_samples(request: HttpRequest, run_id: RunId, query: Query[SampleQuery]) -> SampleList:
    """Newest step first unless `sort` is given. Texts are model output: show them as text."""
    run = get_run_row(request, run_id)
    by: Any = query.sort.removeprefix("-")
    return samples(
        run,
        query.filter(),
        by=by,
        descending=query.sort.startswith("-"),
        limit=query.limit,
        cursor=query.cursor,
        excerpt=query.excerpt,
    )


@router.get("runs/{int:run_id}/samples/{int:sample_id}", summary="One recorded sample")
def show_sample(request: HttpRequest, run_id: RunId, sample_id: SampleId) -> OneSample:
    """The response, and the figures of at most 500 responses to the same prompt, oldest step first."""
    run = get_run_row(request, run_id)
    if sample_id > LARGEST_ID:
        raise SampleRow.DoesNotExist
    return sample(run, sample_id)

"""Recorded answers over HTTP: `runs/{id}/samples` (docs/interfaces.md)."""

from __future__ import annotations

from typing import Any, Literal

from django.http import HttpRequest
from ninja import Query, Router, Schema
from pydantic import Field, FiniteFloat

from oppo_platform.api.lookups import LARGEST_ID, run_of
from oppo_platform.api.paging import MOST
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


class SampleQuery(Schema):
    """Which answers and in which order; names are those of the page's address, too."""

    step: int | None = Field(None, ge=0, le=LARGEST_STEP)
    from_step: int | None = Field(None, ge=0, le=LARGEST_STEP)
    to_step: int | None = Field(None, ge=0, le=LARGEST_STEP)
    min_score: FiniteFloat | None = None
    max_score: FiniteFloat | None = None
    min_age: int | None = Field(None, ge=0, le=LARGEST_STEP)
    max_age: int | None = Field(None, ge=0, le=LARGEST_STEP)
    ending: Ending | None = None
    held_out: bool | None = None
    prompt: str = Field("", pattern="^([0-9a-f]{32})?$")
    q: str = Field("", max_length=1000)
    sort: Sort = "-step"
    limit: int = Field(20, ge=1, le=MOST)
    cursor: str = Field("", max_length=500)
    excerpt: int = Field(0, ge=0, le=100_000)

    def filter(self) -> SampleFilter:
        """The conditions; `step` is short for both bounds."""
        return SampleFilter(
            from_step=self.from_step if self.step is None else self.step,
            to_step=self.to_step if self.step is None else self.step,
            min_score=self.min_score,
            max_score=self.max_score,
            min_age=self.min_age,
            max_age=self.max_age,
            ending=self.ending,
            held_out=self.held_out,
            prompt=self.prompt,
            words=self.q,
        )


@router.get("runs/{int:run_id}/samples", summary="Recorded answers")
def list_samples(request: HttpRequest, run_id: int, query: Query[SampleQuery]) -> Any:
    """Newest step first unless `sort` says otherwise. Texts are what a model wrote: show them as text."""
    run = run_of(request, run_id)
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


@router.get("runs/{int:run_id}/samples/{int:sample_id}", summary="One recorded answer")
def show_sample(request: HttpRequest, run_id: int, sample_id: int) -> dict[str, Any]:
    """The answer, and the figures of all answers to the same prompt."""
    run = run_of(request, run_id)
    if sample_id > LARGEST_ID:
        raise SampleRow.DoesNotExist
    return sample(run, sample_id)

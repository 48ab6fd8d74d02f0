"""Earlier runs of a team that a plan can be based on: the same actor, on the same kind of device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from django.db.models import Exists, OuterRef, Subquery

from oppo_contract.spec import RunSpec, load_stored_spec
from oppo_contract.spec_errors import SpecError
from oppo_estimate.calibration import EarlierRun, comparable
from oppo_platform.runs.models import Allocation, Attempt, Run
from oppo_platform.telemetry.blocks import Buckets
from oppo_platform.telemetry.metric_reader import (
    EVERYTHING,
    AttemptRange,
    Parts,
    Range,
    attempt_ranges_by_run,
    read_buckets,
    read_points,
)
from oppo_platform.telemetry.metric_writer import AXIS_KEYS
from oppo_platform.telemetry.overlap_savings import overlap_savings

LEAST_STEPS = 3
RECENT_RUNS, CANDIDATES = 500, 20  # of the team, and of those the ones whose specs are compared
SAVING_RUNS, SAVING_STEPS = 3, 30  # whose timelines are read
GB = 10**9
DECODE_TIME, PROMPT_TOKENS, CLIPPED = "timing_s/gen", "prompt_length/mean", "response_length/clip_ratio"
# Peak memory, the first that a run has: of the first rank's fullest GPU, or of its processes, beside which other ranks may run.
GPU_PEAK, CPU_PEAKS = "perf/max_memory_allocated_gb", ("perf/max_rss_gb", "perf/rss_gb")
PEAK_MEMORY = (GPU_PEAK, *CPU_PEAKS)


class Trained(NamedTuple):
    """Steps that a run trained itself, and their seconds, response tokens and device-seconds."""

    steps: int
    elapsed_s: float
    tokens: float
    device_s: float


def earlier_runs(team_id: int, spec: RunSpec, kind: str, device: str) -> list[EarlierRun]:
    """The team's runs that are comparable to `spec`, the newest first, with their measurements; see `oppo_estimate.calibration`.

    Args:
        kind, device: of the devices, `cuda` or `cpu` and the driver's name (`cluster.Device`).
    """
    chosen = comparable(spec, _candidates(team_id, spec, kind, device))
    runs = Run.objects.in_bulk([run.run_id for run in chosen])
    ranges = attempt_ranges_by_run(runs.values())
    series = whole_series(ranges, (DECODE_TIME, PROMPT_TOKENS, CLIPPED, *PEAK_MEMORY))
    overlaps = spec.overlap.intra_step != "off" or spec.overlap.inter_step != "off"
    return [
        replace(
            run,
            decode_s=_mean(series.get((run.run_id, DECODE_TIME))),
            prompt=_mean(series.get((run.run_id, PROMPT_TOKENS))),
            clipped=_mean(series.get((run.run_id, CLIPPED))),
            peak_bytes=peak_memory(run.run_id, series, run.spec.resources.ranks_per_node),
            saved=_saved(runs[run.run_id], ranges[run.run_id]) if overlaps and place < SAVING_RUNS else None,
        )
        for place, run in enumerate(chosen)
    ]


def _candidates(team_id: int, spec: RunSpec, kind: str, device: str) -> list[EarlierRun]:
    recent = Run.objects.filter(project__team_id=team_id, deleted_at__isnull=True, step__gte=LEAST_STEPS).order_by("-pk")
    on_device = Allocation.objects.filter(attempt__run=OuterRef("pk"), device__kind=kind, device__model=device)
    node = Attempt.objects.filter(run=OuterRef("pk")).order_by("-epoch")
    rows = (
        Run.objects.filter(pk__in=recent.values("pk")[:RECENT_RUNS], generated_tokens__gt=0, elapsed_s__gt=0)
        .filter(Exists(on_device), spec__models__actor=spec.models.actor.model_dump(mode="json"))
        .annotate(cores=Subquery(node.values("node__cpus")[:1]))
        .order_by("-pk")
    )
    fields = ("spec", "forked_step", "step", "elapsed_s", "generated_tokens", "device_seconds")
    runs = rows.only(*fields)[:CANDIDATES]
    own = trained_by(runs, attempt_ranges_by_run([run for run in runs if run.forked_step is not None]))
    return [found for run in runs if (found := _earlier_run(run, own.get(run.pk))) is not None]


def trained_by(runs: Iterable[Run], ranges: Parts) -> dict[int, Trained]:
    """What each run trained itself, by run id; absent where it is not known.

    A fork's counters go on from those of its parent, which may have used other devices or be deleted: of a fork the steps after
    its first one count.

    Args:
        ranges: of the forks (`attempt_ranges_by_run`).
    """
    runs = list(runs)
    forks = {run.pk: run.forked_step + 1 for run in runs if run.forked_step is not None}
    first = read_points({pk: ranges[pk] for pk in forks}, set(AXIS_KEYS), {pk: Range(at - 1, at) for pk, at in forks.items()})
    result = {}
    for run in runs:
        begin = [0.0, 0.0, 0.0]
        if run.pk in forks:
            begin = [float(first[run.pk, key][1][0]) if (run.pk, key) in first else math.nan for key in AXIS_KEYS]
        totals = (run.elapsed_s, run.generated_tokens, run.device_seconds)
        trained = Trained(run.step - forks.get(run.pk, 0), *(last - start for last, start in zip(totals, begin, strict=True)))
        if trained.steps > 0 and trained.elapsed_s > 0:
            result[run.pk] = trained
    return result


def _earlier_run(run: Run, trained: Trained | None) -> EarlierRun | None:
    """None for a spec that is not valid any more, and without enough steps of its own."""
    if trained is None or trained.steps < LEAST_STEPS or not trained.tokens > 0:
        return None
    try:
        spec = load_stored_spec(run.spec)
    except SpecError:
        return None
    cores: int = run.cores  # type: ignore[attr-defined]  # annotated by `_candidates`
    response = trained.tokens / (trained.steps * spec.ppo.rows)
    return EarlierRun(run.pk, spec, cores, trained.elapsed_s / trained.steps, None, response, None)


def whole_series(ranges: Parts, keys: Iterable[str]) -> dict[tuple[int, str], Buckets]:
    """Each metric of each run as one bucket, by run id and key; those that a run lacks are absent."""
    return read_buckets(ranges, set(keys), EVERYTHING, 1)


def peak_memory(run_id: int, series: Mapping[tuple[int, str], Buckets], ranks: int) -> int | None:
    """Peak memory of the run's fullest device, bytes; None if it was not measured.

    Args:
        series: of `PEAK_MEMORY`.
        ranks: processes of the run on a node, of which the first reports.
    """
    peaks = {key: float(series[run_id, key]["high"].max()) for key in PEAK_MEMORY if (run_id, key) in series}
    found = next(((key, peak) for key, peak in peaks.items() if math.isfinite(peak)), None)
    return None if found is None else int(found[1] * GB * (ranks if found[0] in CPU_PEAKS else 1))


def _mean(buckets: Buckets | None) -> float | None:
    mean = math.nan if buckets is None else float(buckets["mean"][0])
    return mean if math.isfinite(mean) else None


def _saved(run: Run, ranges: Sequence[AttemptRange]) -> float | None:
    """Time that overlap saved ÷ the run's time, on some of its recorded steps; None without work in them."""
    savings = overlap_savings(run, SAVING_STEPS, ranges)
    known = savings["measured_s"] > 0 and savings["sequential_s"] > 0
    return savings["sequential_s"] / savings["measured_s"] - 1 if known else None

"""The runs and the verdict of `bench/plan_accuracy.py`; the bench itself trains for minutes."""

from __future__ import annotations

from oppo_bench.studies.plan_accuracy import LEARNED, UNSEEN, Comparison, complaints, describe, line, results_of, spec_with
from oppo_contract.spec import load_spec


def compared(planned: float | None, actual: float | None, memory: tuple[float | None, float | None] = (1e9, 1e9)) -> Comparison:
    figures = ({"step_s": planned, "peak_memory_bytes": memory[0]}, {"step_s": actual, "peak_memory_bytes": memory[1]})
    return Comparison("run", "earlier_runs", *figures)


def test_ten_valid_runs_that_differ_from_those_to_learn_from() -> None:
    assert len(UNSEEN) == 10
    specs = [load_spec(spec_with(changes, 5, "x")) for changes in (*LEARNED, *UNSEEN)]
    assert len({spec.model_dump_json() for spec in specs}) == len(specs)
    assert len({describe(changes) for changes in (*LEARNED, *UNSEEN)}) == len(specs)


def test_the_median_deviation_decides() -> None:
    good = results_of([compared(1.0, 1.1), compared(1.0, 0.9), compared(1.0, 9.0)])
    assert {result.name: round(result.median, 6) for result in good} == {"time/deviation": 0.1, "memory/deviation": 0.0}
    assert complaints(good) == []
    slow = results_of([compared(1.0, 1.3), compared(1.0, 1.1, (1e9, 1.2e9)), compared(1.0, 1.4)])
    assert complaints(slow) == ["time/deviation: median 30%, at most 20% expected"]


def test_a_figure_without_plan_or_measurement_is_reported() -> None:
    results = results_of([compared(None, 1.0), compared(1.0, None)])
    assert complaints(results) == ["time/deviation was not measured"]
    assert "–" in line(compared(None, 1.0))

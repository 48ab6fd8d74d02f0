"""The cluster simulator: nothing is lost or doubled, baselines do what their names say, figures are what they are defined as."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oppo_bench.cluster import (
    Cluster,
    Conduct,
    Outcome,
    Planner,
    PoolOfNodes,
    Recipe,
    Submission,
    TeamInTrace,
    Trace,
    TraceError,
    compute_figures,
    easy,
    fifo,
    read_trace,
    simulate,
    synthesize,
)
from oppo_bench.cluster.fairness import entitled, jain
from oppo_cli.main import main
from oppo_platform.scheduling import policy
from oppo_platform.scheduling.policy import Decisions, PolicySettings, Preemption, Snapshot

PLANNERS: dict[str, Planner] = {"policy": policy.plan, "fifo": fifo, "easy": easy}
AT_ONCE = Conduct(cycle_s=0.001)
COARSE = Conduct(recheck_s=1800.0)
SMALL = Recipe(runs=60, gpus=32, load=1.1)


def trace(*submissions: Submission, gpus: int = 4, nodes: int = 1, teams: tuple[str, ...] = ("alpha", "beta")) -> Trace:
    """A small trace on `nodes` nodes of `gpus` GPUs."""
    pools = (PoolOfNodes(name="pool", nodes=nodes, gpus=gpus),)
    return Trace(Cluster(pools=pools, teams=tuple(TeamInTrace(name=name) for name in teams)), submissions)


def run(at_s: float, devices: int, duration_s: float, **changes: Any) -> Submission:
    """A submission of team alpha that is estimated rightly."""
    told = {"team": "alpha", "estimate_s": duration_s, **changes}
    return Submission(at_s=at_s, devices=devices, duration_s=duration_s, **told)


def starts(outcome: Outcome) -> list[float]:
    """When each run started first."""
    return [min(h.start for h in outcome.holds if h.run_id == number) for number in sorted(outcome.ends)]


def no_device_twice(outcome: Outcome) -> None:
    """The oracle: sorted by device and time, no hold begins before the one in front of it has ended."""
    spans = sorted((device, hold.start, hold.end) for hold in outcome.holds for device in hold.devices)
    for before, after in pairwise(spans):
        assert before[0] != after[0] or before[2] <= after[1], (before, after)


def every_run_accounted_for(outcome: Outcome) -> None:
    """Each ends, is refused or is left over, exactly one of them; who ends did all its work, and waits and holds take turns."""
    everyone = sorted([*outcome.ends, *outcome.refused, *outcome.stuck])
    assert everyone == list(range(1, len(outcome.trace.submissions) + 1))
    for run_id, end in outcome.ends.items():
        asked = outcome.trace.submissions[run_id - 1]
        holds = sorted((h for h in outcome.holds if h.run_id == run_id), key=lambda h: h.start)
        waits = sorted((w for w in outcome.waits if w.run_id == run_id), key=lambda w: w.start)
        assert [h.preempted for h in holds] == [True] * (len(holds) - 1) + [False]
        assert all(len(h.devices) == asked.devices for h in holds)
        told = [
            moment for wait, hold in zip(waits, holds, strict=True) for moment in (wait.start, wait.end, hold.start, hold.end)
        ]
        assert told == sorted(told)
        assert told[0] == asked.at_s
        assert told[-1] == end
        worked = sum(h.end - h.start - h.lost_s - h.idle_s for h in holds)
        if asked.max_runtime_s is None:
            assert worked == pytest.approx(asked.work_s, abs=1e-3)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("shape", ["steady", "burst", "gangs"])
def test_no_run_is_lost_or_duplicated(planner: str, shape: str) -> None:
    outcome = simulate(synthesize(replace(SMALL, shape=shape)), PLANNERS[planner], COARSE)
    no_device_twice(outcome)
    every_run_accounted_for(outcome)


@pytest.mark.full
@pytest.mark.parametrize("planner", PLANNERS)
@given(st.integers(0, 10_000), st.sampled_from(["steady", "burst", "gangs"]), st.floats(0.5, 2.0), st.sampled_from([8, 64, 128]))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_run_is_lost_or_duplicated_in_any_trace(planner: str, seed: int, shape: str, load: float, gpus: int) -> None:
    recipe = Recipe(shape, seed=seed, runs=60, gpus=gpus, load=load)
    outcome = simulate(synthesize(recipe), PLANNERS[planner], COARSE)
    no_device_twice(outcome)
    every_run_accounted_for(outcome)


def test_the_same_seed_gives_the_same_outcome() -> None:
    made = [synthesize(replace(SMALL, seed=seed)) for seed in (1, 1, 2)]
    assert list(made[0].lines()) == list(made[1].lines()) != list(made[2].lines())
    one, other = (compute_figures(simulate(each, policy.plan, COARSE)) for each in made[:2])
    assert asdict(one) == asdict(other)


def test_a_synthetic_trace_has_the_load_and_the_burst_that_were_asked_for() -> None:
    made = synthesize(Recipe("burst", runs=1000, gpus=64, load=0.7))
    asked = sum(s.devices * s.duration_s for s in made.submissions)
    assert asked / (64 * made.last_s) == pytest.approx(0.7, rel=0.02)
    instants = [s.at_s for s in made.submissions if s.team == "team-1"]
    assert max(map(instants.count, instants)) == 200
    assert {s.devices for s in made.submissions} <= {1, 2, 4, 8, 16, 32, 64}


# Four GPUs: 1 takes three until 100, 2 wants all four, 3 wants one for 50 (ends before 2 could start), 4 wants one for 500.
QUEUE = (run(0, 3, 100), run(1, 4, 100), run(2, 1, 50), run(3, 1, 500))


def test_fifo_as_worked_out_by_hand() -> None:
    assert starts(simulate(trace(*QUEUE), fifo, AT_ONCE)) == pytest.approx([0, 100, 200, 200], abs=0.01)


def test_backfill_as_worked_out_by_hand() -> None:
    outcome = simulate(trace(*QUEUE), easy, AT_ONCE)
    assert starts(outcome) == pytest.approx([0, 100, 2, 200], abs=0.01)
    figures = compute_figures(outcome)
    assert figures.wait.mean == pytest.approx((99 + 0 + 197) / 4, abs=0.01)
    assert figures.makespan_s == pytest.approx(700, abs=0.01)
    # Until the last submission, at 3: three devices for three seconds and one for one, of four for three seconds.
    assert figures.utilization == pytest.approx(10 / 12, abs=0.01)


def test_without_an_estimate_nobody_gets_a_reserved_device() -> None:
    queue = (*QUEUE[:2], run(2, 1, 50, estimate_s=None))
    assert starts(simulate(trace(*queue), easy, AT_ONCE)) == pytest.approx([0, 100, 200], abs=0.01)


class Promises:
    """EASY, noting the earliest start that each head was promised."""

    def __init__(self) -> None:
        self.first: dict[int, float] = {}

    def __call__(self, snapshot: Snapshot, now: float) -> Decisions:
        decided = easy(snapshot, now)
        for reservation in decided.reservations:
            if reservation.start is not None:
                self.first.setdefault(reservation.run_id, reservation.start)
        return decided


@pytest.mark.parametrize("seed", range(4))
def test_backfill_never_delays_the_head(seed: int) -> None:
    recipe = replace(SMALL, seed=seed, load=1.5, estimate_sigma=0.0, estimate_missing=0.0, bounded=0.0)
    promises = Promises()
    outcome = simulate(synthesize(recipe), promises, AT_ONCE)
    began = dict(enumerate(starts(outcome), 1))
    assert len(promises.first) > 2
    for run_id, promised in promises.first.items():
        # Estimates are rounded up to whole seconds.
        assert began[run_id] <= promised + 1.1, run_id


def test_preemption_costs_at_most_a_checkpoint_interval_and_a_restart() -> None:
    made = synthesize(replace(SMALL, runs=150, load=1.5, preemptible=1.0))
    conduct = Conduct(recheck_s=900.0, checkpoint_s=300.0, restart_s=60.0)
    holds = simulate(made, policy.plan, conduct).holds
    stopped = [h for h in holds if h.preempted]
    assert len(stopped) > 2
    assert all(0.0 <= h.lost_s < conduct.checkpoint_s for h in stopped)
    assert all(h.idle_s <= conduct.restart_s + conduct.policy.stop_s for h in stopped)
    assert all(h.end - h.start >= conduct.policy.min_runtime_s for h in stopped)


class Stops:
    """FIFO that preempts run 1 once, at the first plan after 1,000 s."""

    done = False

    def __call__(self, snapshot: Snapshot, now: float) -> Decisions:
        if now > 1000 and not self.done:
            self.done = True
            return Decisions(preemptions=(Preemption(1, 2, "reclaim", ""),))
        return fifo(snapshot, now)


def test_a_preempted_run_resumes_at_its_checkpoint() -> None:
    conduct = Conduct(cycle_s=1.0, checkpoint_s=400.0, restart_s=30.0, policy=PolicySettings(stop_s=10.0))
    outcome = simulate(trace(run(0, 4, 2000), run(1100, 4, 100)), Stops(), conduct)
    first, second = sorted((h for h in outcome.holds if h.run_id == 1), key=lambda h: h.start)
    # Stopped at 1,100 with 800 s saved; it keeps its place in front of run 2.
    assert (first.end, first.lost_s, first.idle_s) == (1110.0, 300.0, 10.0)
    assert (second.start, second.end) == (1110.0, 1110.0 + 30.0 + 1200.0)
    assert compute_figures(outcome).lost_gpu_s == 4 * 300.0


def test_infeasible_run_is_refused_and_blocks_no_other() -> None:
    outcome = simulate(trace(run(0, 8, 10), run(1, 4, 10)), fifo, AT_ONCE)
    assert list(outcome.refused) == [1]
    assert outcome.ends == {2: 11.0}


def test_a_planner_that_gives_a_device_twice_is_refused() -> None:
    def doubles(snapshot: Snapshot, now: float) -> Decisions:
        return fifo(replace(snapshot, running=()), now)

    with pytest.raises(ValueError, match="not free"):
        simulate(trace(run(0, 4, 100), run(1, 4, 100)), doubles, AT_ONCE)


def test_fairness_by_its_definition() -> None:
    assert entitled(10, {"a": 2, "b": 9, "c": 9}, {"a": 1, "b": 1, "c": 3}) == pytest.approx({"a": 2, "b": 2, "c": 6})
    assert jain([1, 1, 1]) == 1
    assert jain([1, 0, 0, 0]) == 0.25


def test_fragmentation_counts_what_is_idle_while_a_gang_waits_that_would_fit() -> None:
    # Two nodes of 2. From 20 on each has one free device; the run of two devices on one node waits from 30 until 100.
    queue = (run(0, 1, 100), run(0, 1, 20), run(0, 1, 100), run(0, 1, 20), run(30, 2, 10), run(130, 1, 1))
    outcome = simulate(trace(*queue, nodes=2, gpus=2), fifo, AT_ONCE)
    assert starts(outcome) == pytest.approx([0, 0, 0, 0, 100, 130], abs=0.01)
    assert compute_figures(outcome).fragmentation == pytest.approx(2 * 70 / (4 * 130), abs=0.001)


LINE = '{"at_s": 0, "team": "a", "devices": 1, "duration_s": 5}'
FIRST = '{"pools": [{"name": "p", "nodes": 1, "gpus": 8}], "teams": [{"name": "a"}]}'


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "empty"),
        ([FIRST, LINE, LINE.replace('"devices": 1', '"devices": "1"')], "Line 3, devices"),
        ([FIRST, LINE.replace('"team": "a"', '"team": "b"')], "Line 2, team"),
        ([FIRST, LINE.replace("at_s", "when")], "Line 2, at_s"),
        ([FIRST, LINE[:-1]], "Line 2"),
        ([FIRST.replace('"gpus": 8', '"gpus": 0'), LINE], "Line 1, pools.0.gpus"),
        ([FIRST.replace('{"name": "a"}', '{"name": "a"}, {"name": "a"}')], "Line 1, teams"),
        ([FIRST.replace('{"name": "a"}', '{"name": "a", "quotas": {"q": {"nominal": 1}}}')], "Line 1, teams.0.quotas"),
    ],
)
def test_a_bad_trace_is_refused_with_line_and_field(lines: list[str], complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        read_trace(lines)


def test_a_trace_survives_writing_and_reading() -> None:
    made = synthesize(SMALL)
    assert read_trace(made.lines()) == made


def test_the_documented_trace_is_read() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/scheduling.md").read_text()
    [lines] = [text.splitlines() for info, text in re.findall(r"```(.*)\n([^`]*)```", page) if "trace.jsonl" in info]
    documented = read_trace(lines)
    assert documented.submissions[0].devices == 8
    written = json.loads(documented.submissions[0].model_dump_json())
    assert set(written) == set(json.loads(lines[1]))


def test_the_end_of_a_running_run_is_known_once_it_was_measured() -> None:
    told: list[float | None] = []

    def watches(snapshot: Snapshot, now: float) -> Decisions:
        told.extend(running.expected_end for running in snapshot.running)
        return fifo(snapshot, now)

    conduct = Conduct(cycle_s=1.0, recheck_s=100.0, measured_s=300.0)
    simulate(trace(run(0, 4, 1000, estimate_s=None), run(10, 4, 10)), watches, conduct)
    assert told[0] is None
    assert told[-1] == 1000.0


def oppo(*arguments: str) -> Iterator[str]:
    """The lines that the command prints."""
    result = CliRunner().invoke(main, ["cluster", *arguments])
    assert result.exit_code == 0, result.output
    yield from result.output.splitlines()


def test_the_command_compares_three_planners(tmp_path: Path) -> None:
    file, written = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    file.write_text("\n".join(oppo("synthesize", "--runs", "30", "--gpus", "16", "--seed", "3")))
    shown = "\n".join(oppo("simulate", str(file), "--json", str(written)))
    for word in ("policy", "FIFO + backfill", "Jain", "team-1", "wait by devices"):
        assert word in shown
    results = {result["name"]: result for result in json.loads(written.read_text())["results"]}
    assert results["steady/policy/wait_s"]["n"] == 30
    assert all(math.isfinite(result["median"]) for result in results.values())


def test_the_command_refuses_a_bad_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(FIRST + "\n" + LINE.replace("5", '"long"'))
    result = CliRunner().invoke(main, ["cluster", "simulate", str(file)])
    assert result.exit_code == 2
    assert "Line 2, duration_s" in result.output

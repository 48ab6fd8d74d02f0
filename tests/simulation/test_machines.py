"""Built-in machines: they load, their constants follow from what they cite, and what overlaps on them obeys its ceilings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from oppo_contract.spec import RunSpec
from oppo_core.engine.state import Engine
from oppo_core.simulation import sensitivity
from oppo_core.simulation.assemble import assemble, steps_of
from oppo_core.simulation.machine import Machine
from oppo_core.simulation.paper import LAYOUTS, Case, layouts, simulate_case, utilization, verdicts
from oppo_core.simulation.plan import plan
from oppo_estimate.devices import Devices, builtin_names, load_devices
from oppo_estimate.schedules import SCHEDULES, Row, Target, variant

STEPS = 5
# Data sheets: dense bf16 FLOP/s and bytes/s. Models: parameters, layers, key/value heads; heads have 128 dimensions.
GPUS = {"h200": (989e12, 4.8e12), "gh200": (990e12, 4.0e12), "a100": (312e12, 2.039e12)}
MODELS = {"7b": (7.62e9, 28, 4), "3b": (3.09e9, 36, 2)}
MFU = 0.4
# transformers' generation loop: 300.6 s for 8,192 rounds of 32 rows, 8B parameters in 32 layers with 8 key/value heads, on an
# H200; less what reading the cached keys and values must take.
LOOP_US = 300.6e6 / 8192
CACHE_US = 32 * 4096 * (2 * 32 * 8 * 128 * 2) / 4.8e12 * 1e6
LAYER_US = (LOOP_US - CACHE_US) / 32
Rows = dict[str, Row]


@pytest.fixture(scope="module")
def measurements() -> list[tuple[Case, Rows]]:
    """Every lay-out of the paper, a few steps."""
    return [(case, simulate_case(case, STEPS)) for case in layouts()]


@pytest.mark.parametrize("name", builtin_names())
def test_every_machine_loads_and_says_what_it_is(name: str) -> None:
    devices = load_devices(name)
    assert devices.name == name
    assert devices.description


@pytest.mark.parametrize("name", LAYOUTS)
def test_constants_follow_from_data_sheets_and_cited_measurements(name: str) -> None:
    costs = load_devices(name).costs
    _, gpu, size = name.split("-")
    (peak, bandwidth), (parameters, layers, heads) = GPUS[gpu], MODELS[size]
    forward_us = 1e6 * 2 * parameters / (MFU * peak)
    expected = {
        "round": (costs.decode.round_us, layers * LAYER_US),
        "row": (costs.decode.row_us, 1e6 * 2 * parameters / peak),
        "cache": (costs.decode.cached_token_us, 1e6 * 2 * layers * heads * 128 * 2 / bandwidth),
        "pass": (costs.actor.pass_us, 1e6 * 2 * parameters / bandwidth),
        "token": (costs.actor.token_us, forward_us),
        "backward": (costs.actor.backward_us, 3 * forward_us),
        "reward pass": (costs.reward.pass_us, 1e6 * 2 * MODELS["7b"][0] / bandwidth),
        "reward": (costs.reward.token_us, 1e6 * 2 * MODELS["7b"][0] / (MFU * peak)),
    }
    for what, (told, derived) in expected.items():
        assert told == pytest.approx(derived, rel=0.035), what
    assert (costs.critic.token_us, costs.critic.backward_us) == (costs.actor.token_us, costs.actor.backward_us)
    assert costs.reference.token_us == costs.actor.token_us


def test_overlap_saves_no_more_than_what_it_hides(measurements: list[tuple[Case, Rows]]) -> None:
    for case, rows in measurements:
        free = case.devices.costs.model_copy(update={"reward": case.devices.costs.reward.model_copy(update={"token_us": 0.0})})
        ceiling = measured_alone(replace(case, devices=case.devices.model_copy(update={"costs": free})))
        gain = {name: row.speedup for name, row in rows.items()}
        assert gain["sequential"] == pytest.approx(1)
        assert 1 < gain["intra"] <= rows["sequential"].us_per_token / ceiling.us_per_token * 1.001, case.name
        assert max(gain["intra"], gain["inter"]) < gain["both"], case.name
        assert all(0 < row.utilization <= 1 and 0 < row.decode_share < 1 for row in rows.values())
        assert rows["both"].age_max <= case.spec.overlap.max_age
        assert 1 <= rows["both"].deferred_age <= case.spec.overlap.max_age


def measured_alone(case: Case) -> Row:
    """The sequential run of a lay-out."""
    return plan(case.spec, case.devices, Target(1), STEPS, schedules=("sequential",))[0]


def test_only_kernels_in_decode_make_the_two_utilizations_differ(measurements: list[tuple[Case, Rows]]) -> None:
    for case, rows in measurements:
        for row in rows.values():
            assert utilization(row, case, 1.0) == pytest.approx(row.utilization)
            assert 0 < utilization(row, case, 0.37) < utilization(row, case, 0.76) < row.utilization


def test_every_figure_of_the_paper_has_a_verdict(measurements: list[tuple[Case, Rows]]) -> None:
    judged = {one.claim.what: one for one in verdicts(measurements)}
    assert judged["speed-up, both"].low == pytest.approx(min(rows["both"].speedup for _, rows in measurements))
    assert judged["time per step, both"].explained == "not comparable"
    for one in judged.values():
        inside = one.claim.low <= one.low and one.high <= one.claim.high
        apart = one.high < one.claim.low or one.claim.high < one.low
        assert (one.explained == "yes", one.explained.startswith("no:")) == (inside, apart) or not one.claim.comparable


def test_every_assumption_changes_one_thing() -> None:
    cases = {case.name: case for case in sensitivity.cases()}
    assert len(cases) == len(sensitivity.CHANGES) + 4
    base = cases["as assumed"]
    for case in cases.values():
        if case is not base:
            assert (case.spec, case.devices, case.baseline) != (base.spec, base.devices, base.baseline), case.name
    doubled = cases["decode step 58 ms (twice as slow)"].devices.costs
    assert doubled.decode.round_us == 2 * base.devices.costs.decode.round_us
    assert doubled.actor == base.devices.costs.actor


def served(longest: int, median: int, seed: int = 0, batches: tuple[int, ...] = sensitivity.BATCHES) -> list[Rows]:
    """Rows of the serving cases with these answers, by batch size."""
    cases = {case.name: case for case in sensitivity.serving_cases(seed)}
    names = [f"B {batch:,}, median {median}, to {longest:,}" for batch in batches]
    return [sensitivity.simulate_serving(cases[name], STEPS) for name in names]


def test_with_a_serving_engine_overlap_gains_less_the_larger_the_batch() -> None:
    small, middle, large = served(512, 64, seed=1)
    for schedule, margin in (("inter", 0.1), ("both", 0.2), (sensitivity.HALVES, 0.2)):
        gain = [rows[schedule].speedup for rows in (small, middle, large)]
        assert gain[0] > gain[1] + margin > gain[2] + 2 * margin, schedule
    assert all(rows["intra"].speedup < 1 < rows["inter"].speedup for rows in (small, middle, large))
    assert large["both"].speedup < 1 < large[sensitivity.HALVES].speedup < large["inter"].speedup + 0.05


def test_with_a_serving_engine_deferral_needs_a_tail() -> None:
    (long,), (cut,) = served(4096, 512, batches=(112,)), served(512, 512, batches=(112,))
    assert long["inter"].speedup > 1.7
    assert cut["inter"].speedup == pytest.approx(1, abs=0.05)
    assert cut["both"].speedup < 1 < cut[sensitivity.HALVES].speedup
    assert long["sequential"].decode_share > cut["sequential"].decode_share + 0.2


def test_serving_cases_share_every_device_unless_they_stream() -> None:
    cases = sensitivity.serving_cases()
    assert len({case.name for case in cases}) == len(sensitivity.BATCHES) * len(sensitivity.ANSWERS)
    for case in cases:
        assert (case.devices.without_streaming, case.devices.padded) == ("share", False)
        assert case.devices.costs.decode.round_us == sensitivity.KERNELS_US
        assert (case.spec.ppo.epochs, case.spec.ppo.batch_size // case.spec.overlap.overcommit.initial) == (1, 4)
        assert case.spec.overlap.chunk.size * 8 == case.spec.rollout.max_new_tokens


@pytest.mark.full
def test_the_command_prints_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With two assumptions and one serving case of the many; the rest only takes longer."""
    from oppo_cli.simulate import simulate

    monkeypatch.setattr(sensitivity, "CHANGES", sensitivity.CHANGES[:2])
    monkeypatch.setattr(sensitivity, "BATCHES", (112,))
    monkeypatch.setattr(sensitivity, "ANSWERS", ((512, 64),))
    file = tmp_path / "paper.json"
    told = CliRunner().invoke(simulate, ["--paper", "--steps", "3", "--json", str(file)], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    served_case, known = "B 112, median 64, to 512", ("paper-a100-7b", "1.80–2.80 ×", "35.7–50.6 %", "σ 0.5", "5,200 min")
    for text in (*known, "explained?", "fitted", served_case, sensitivity.HALVES):
        assert text in told.output
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert sorted(document["layouts"]) == sorted(LAYOUTS)
    assert [row["schedule"] for row in document["serving"][served_case]][-1] == sensitivity.HALVES
    assert {figure["figure"] for figure in document["figures"]} >= {"speed-up, intra only", "speed-up, inter only"}


def test_padded_rows_attend_as_far_as_the_longest(even: Callable[..., Devices]) -> None:
    decode = even().costs.decode.model_copy(update={"round_us": 0.0, "row_us": 0.0, "cached_token_us": 1.0})
    devices = even(costs=even().costs.model_copy(update={"decode": decode}))
    plain, padded = (Machine(devices.model_copy(update={"padded": pads}), False, 1000) for pads in (False, True))
    # Two rounds over rows with 5 and 3 cached tokens, of three that began.
    assert plain.decode_us(2, [5, 3], 3) == (5 + 3) + (6 + 4)
    assert padded.decode_us(2, [5, 3], 3) == 3 * 5 + 3 * 6


@pytest.mark.parametrize("name", ["cpu-2-s", "cpu-2-m", "paper-gh200-3b"])
@pytest.mark.parametrize("overlap", [{}, {"intra_step": "per_chunk", "inter_step": "defer"}])
def test_idle_seconds_sum_to_the_bubbles(name: str, overlap: dict[str, Any], small: Callable[..., RunSpec]) -> None:
    spec = small({"steps": 4, "ppo": {"batch_size": 8}, "overlap": overlap | {"chunk": {"size": 64}}})
    engine: Engine = assemble(spec, load_devices(name))
    for step in steps_of(engine):
        for device in engine.layout.devices:
            idle = sum(seconds for key, seconds in step.items() if key.startswith(f"idle_s/{device}/"))
            assert idle == pytest.approx(step[f"bubble/{device}"] * step["timing_s/step"])
            assert step[f"idle_s/{device}/unknown"] == pytest.approx(0)


def test_settings_without_effect_are_left_out_of_a_schedule(small: Callable[..., RunSpec]) -> None:
    changes = {"steps": 50, "ppo": {"value_warmup_steps": 9}, "overlap": {"inter_step": "defer", "kv_after_update": "keep"}}
    variants = {name: variant(small(changes), name, steps=5) for name in SCHEDULES if "update" not in name}
    assert {spec.ppo.value_warmup_steps for spec in variants.values()} == {4}
    kept = {name for name, spec in variants.items() if spec.overlap.kv_after_update == "keep"}
    assert kept == {"inter", "both"}


def test_update_overlap_can_be_planned_where_the_critic_is_beside(small: Callable[..., RunSpec]) -> None:
    spec = small({"ppo": {"batch_size": 16}, "rollout": {"max_new_tokens": 512, "max_prompt_tokens": 16},
                  "overlap": {"chunk": {"size": 32}}})  # fmt: skip
    rows = {row.schedule: row for row in plan(spec, load_devices("cpu-2-s"), Target(10), 12)}
    assert not any(row.problem for row in rows.values())
    assert rows["both + update overlap"].speedup > rows["both"].speedup > 1
    refused = {row.schedule: row for row in plan(spec, load_devices("paper-h200-7b"), Target(10), 3)}
    assert "critic" in (refused["both + update overlap"].problem or "")

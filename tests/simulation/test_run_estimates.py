"""Estimates of a plan: memory and time of a run from the shapes of its models, scaled to earlier runs. No torch, no database."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_contract.spec import RunSpec, load_spec
from oppo_estimate.calibration import EarlierRun, EstimateInputs, comparable, estimate_step, expected_lengths, expected_peak
from oppo_estimate.device_memory import Host, find_remedy, planned_devices
from oppo_estimate.device_speed import CORE, device_speed, stated_gpu
from oppo_estimate.response_lengths import NEVER, Endings, fit_endings
from oppo_estimate.roles import role_head
from oppo_estimate.shapes import Shape, tiny_shape
from oppo_estimate.step_time import Lengths, decode_rounds, stages

TINY = {"tiny": {"hidden": 64, "layers": 2, "heads": 4, "context": 4096, "vocab": 512}}
GIB = 2**30


def spec_with(*, models: dict[str, Any] | None = None, **sections: Any) -> RunSpec:
    tree = {
        "name": "x", "steps": 10, "models": {"actor": TINY, "reward": {"rule": "letters:score"}} | (models or {}),
        "data": {"prompts": "p"}, "rollout": {"max_new_tokens": 128, "max_prompt_tokens": 32}, "resources": {"kind": "cpu"},
    }  # fmt: skip
    return load_spec(tree | sections)


def shapes_of(spec: RunSpec) -> dict[str, Shape]:
    return {name: tiny_shape(model.tiny, role_head(name)) for name, model in spec.role_models().items() if model.tiny}


def model_of(spec: RunSpec, cores: int = 2, memory: int = 64 * GIB) -> EstimateInputs:
    return EstimateInputs(shapes_of(spec), Host(memory, cores, gpu=False), CORE, transformers=False)


def needed(spec: RunSpec, cores: int = 2) -> int:
    return max(d.needed for d in planned_devices(spec, shapes_of(spec), Host(GIB, cores, gpu=False), transformers=False))


def measured(spec: RunSpec, run_id: int = 1, **figures: Any) -> EarlierRun:
    return replace(EarlierRun(run_id, spec, 2, 4.0, 1.5, 60.0, 20.0), **figures)


RUNS = st.lists(
    st.builds(
        lambda response, clipped, step_s, share, peak: {
            "response": response, "clipped": clipped, "step_s": step_s, "decode_s": share * step_s, "peak_bytes": peak,
        },
        st.floats(1, 128), st.none() | st.floats(0, 1), st.floats(0.01, 1000), st.floats(0.05, 0.95), st.integers(10**8, 10**11),
    ),
    max_size=4,
)  # fmt: skip


@given(
    intra=st.sampled_from(["off", "per_sequence", "per_chunk"]), inter=st.sampled_from(["off", "defer", "tail_batch"]),
    runs=RUNS, batch=st.integers(1, 64), more=st.integers(1, 8), new_tokens=st.integers(1, 512), longer=st.integers(0, 512),
    deferred=st.integers(0, 8), cores=st.integers(1, 8),
)  # fmt: skip
def test_more_rollouts_or_longer_responses_never_reduce_memory_or_time(
    intra: str, inter: str, runs: Any, batch: int, more: int, new_tokens: int, longer: int, deferred: int, cores: int
) -> None:
    def spec(rows: int, tokens: int) -> RunSpec:
        extra = {"initial": min(deferred, batch), "max": min(deferred, batch)} if inter != "off" else {}
        overlap = {"intra_step": intra, "inter_step": inter, "overcommit": {**extra, "controller": "fixed"} if extra else {}}
        rollout = {"max_new_tokens": tokens, "max_prompt_tokens": 32}
        return spec_with(overlap=overlap, rollout=rollout, ppo={"batch_size": rows})

    small, large = spec(batch, new_tokens), spec(batch + more, new_tokens + longer)
    history = [measured(spec_with(), n, **{**run, "response": min(128.0, run["response"])}) for n, run in enumerate(runs)]
    assert needed(small, cores) <= needed(large, cores)
    before, after = (estimate_step(each, model_of(each, cores), history) for each in (small, large))
    assert before is not None
    assert after is not None
    assert 0 < before.step_s <= after.step_s * (1 + 1e-9)
    if history:
        peaks = [expected_peak(each, model_of(each, cores), history) for each in (small, large)]
        assert peaks[0] is not None
        assert peaks[1] is not None
        assert peaks[0] <= peaks[1]


@given(st.floats(0.5, 1000), st.integers(1, 1000))
def test_the_endings_give_back_the_mean_length(mean: float, longest: int) -> None:
    mean = min(mean, longest * 0.999)
    assert fit_endings(mean, None, longest).mean(longest) == pytest.approx(mean, rel=1e-3)


@given(st.floats(0.0, 0.9), st.floats(0.01, 0.5), st.integers(50, 1000))
def test_the_share_of_responses_that_never_end_is_found(endless: float, rate: float, longest: int) -> None:
    """And with it the mean under any other limit."""
    true = Endings(endless, rate)
    found = fit_endings(true.mean(longest), endless + (1 - endless) * math.exp(-rate * longest), longest)
    for limit in (longest // 3, longest, 3 * longest):
        assert found.mean(limit) == pytest.approx(true.mean(limit), rel=0.02)


def test_responses_that_fill_the_limit_grow_with_it_and_short_ones_do_not() -> None:
    full, short = measured(spec_with(), response=128.0), measured(spec_with(), response=10.0)
    mixed = measured(spec_with(), response=10 + 0.25 * 118, clipped=0.25)
    longer = spec_with(rollout={"max_new_tokens": 1024, "max_prompt_tokens": 32})
    assert expected_lengths(longer, [full]).response == pytest.approx(1024)
    assert expected_lengths(longer, [short]).response == pytest.approx(10, rel=0.01)
    assert expected_lengths(longer, [mixed]).response == pytest.approx(10 + 0.25 * 1014, rel=0.02)
    assert expected_lengths(longer, []) == Lengths(32, NEVER, 1024)


def test_deferral_saves_the_tail() -> None:
    overlap = {"intra_step": "off", "inter_step": "defer", "overcommit": {"initial": 8, "max": 8}}
    waits, defers = spec_with(overlap={"intra_step": "off", "inter_step": "off"}), spec_with(overlap=overlap)
    assert decode_rounds(defers, Endings(0, 1 / 20)) < decode_rounds(waits, Endings(0, 1 / 20)) <= 128
    assert decode_rounds(waits, NEVER) == 128
    assert decode_rounds(waits, Endings(0.1, 1.0)) == 128, "one of the batch never ends"
    assert decode_rounds(defers, Endings(0.1, 1.0)) < 128, "and is deferred"


def test_the_rounds_of_a_whole_batch_are_the_longest_of_its_lengths() -> None:
    """Against drawn lengths: the B-th shortest of B + Δ of them, cut at the limit."""
    draw = random.Random(0)
    for rows, extra, endless in ((8, 0, 0.0), (8, 4, 0.0), (16, 8, 0.1)):
        endings, longest = Endings(endless, 0.05), 200

        def length(endings: Endings = endings, longest: int = longest) -> float:
            return longest if draw.random() < endings.endless else min(longest, draw.expovariate(endings.rate))

        drawn = [sorted(length() for _ in range(rows + extra))[rows - 1] for _ in range(2000)]
        assert endings.rounds(rows, extra, longest) == pytest.approx(sum(drawn) / len(drawn), rel=0.15)


def test_a_comparable_run_gives_back_its_own_time_and_memory() -> None:
    """And twice the rows take longer, but less than twice: a decode step has a cost however few rows it has."""
    spec = spec_with()
    run = measured(spec, peak_bytes=900_000_000)
    estimate = estimate_step(spec, model_of(spec), [run])
    assert estimate is not None
    assert estimate.step_s == pytest.approx(4.0)
    assert estimate.runs == (1,)
    assert expected_peak(spec, model_of(spec), [run]) == pytest.approx(900_000_000, rel=1e-6)
    twice = estimate_step(spec_with(ppo={"batch_size": 32}), model_of(spec), [run])
    assert twice is not None
    assert 4.0 < twice.step_s < 8.0


@pytest.mark.parametrize("decode_s", [None, 0.0, 4.0, 5.0])
def test_a_run_without_a_usable_time_of_decoding_still_counts(decode_s: float | None) -> None:
    spec = spec_with()
    estimate = estimate_step(spec, model_of(spec), [measured(spec, decode_s=decode_s)])
    assert estimate is not None
    assert estimate.step_s == pytest.approx(4.0)


def test_the_median_run_counts() -> None:
    spec = spec_with()
    runs = [measured(spec, n, step_s=seconds, decode_s=seconds / 2) for n, seconds in enumerate([3.0, 4.0, 400.0])]
    estimate = estimate_step(spec, model_of(spec), runs)
    assert estimate is not None
    assert estimate.step_s == pytest.approx(4.0)


def test_runs_of_the_same_kind_come_before_others() -> None:
    sequential = {"intra_step": "off", "inter_step": "off"}
    runs = [
        measured(spec_with(overlap=sequential), 3), measured(spec_with(ppo={"batch_size": 64}), 2),
        measured(spec_with(models={"lora": {}}), 1),
    ]  # fmt: skip
    assert [run.run_id for run in comparable(spec_with(), runs)] == [2]
    assert [run.run_id for run in comparable(spec_with(models={"lora": {}}, overlap=sequential), runs)] == [3]
    assert comparable(spec_with(), []) == []


def test_a_gpu_of_unknown_speed_needs_an_earlier_run() -> None:
    spec = spec_with(resources={"kind": "cuda"})
    model = EstimateInputs(
        shapes_of(spec), Host(80 * GIB, 16, gpu=True), device_speed("Some card", "cuda", spec), transformers=False
    )
    assert model.speed is None
    assert estimate_step(spec, model, []) is None
    estimate = estimate_step(spec, model, [measured(spec)])
    assert estimate is not None
    assert estimate.step_s == pytest.approx(4.0)


def test_the_sequential_time_is_without_overlap() -> None:
    spec = spec_with(overlap={"intra_step": "off", "inter_step": "off"})
    estimate = estimate_step(spec, model_of(spec), [])
    assert estimate is not None
    assert estimate.step_s == estimate.sequential_s


def test_a_cpu_counts_every_process_of_every_rank() -> None:
    def libraries(cores: int, **sections: Any) -> int:
        spec = spec_with(**sections)
        (node,) = planned_devices(spec, shapes_of(spec), Host(GIB, cores, gpu=False), transformers=False)
        return next(item.size for item in node.items if item.name == "processes: libraries")

    one = libraries(1)
    assert libraries(2) == 2 * one, "the scorers have a process of their own"
    assert libraries(2, overlap={"intra_step": "off", "inter_step": "off"}) == one
    assert libraries(4, resources={"kind": "cpu", "processes": 2}) == 4 * one
    critic_free = {"algorithm": "grpo", "group_size": 2}
    assert one < libraries(2, ppo=critic_free) < 2 * one, "scorers without a critic train nothing"


def test_a_gpu_with_scorers_of_its_own_splits_the_roles() -> None:
    spec = spec_with(resources={"kind": "cuda", "devices": 2, "scoring_devices": 1})
    actor, scorers = planned_devices(spec, shapes_of(spec), Host(80 * GIB, 8, gpu=True), transformers=False)
    assert (actor.roles, scorers.roles) == (("actor",), ("reference", "critic"))
    assert {item.name.partition(": ")[0] for item in scorers.items} == {"reference", "critic", "the GPU's libraries"}


def test_the_least_invasive_change_that_fits_is_the_remedy() -> None:
    spec = spec_with(ppo={"batch_size": 64}, rollout={"max_new_tokens": 512, "max_prompt_tokens": 32})
    fits = lambda available: find_remedy(spec, needed, available)  # noqa: E731
    full = needed(spec)
    assert set(fits(int(0.95 * full)) or {}) == {"ppo.micro_batch_tokens"}
    lowest = min(
        needed(spec_with(ppo={"batch_size": 64, "micro_batch_tokens": 1024}, rollout=spec.rollout.model_dump(exclude_unset=True),
                         training={"recompute": "full"})), full)  # fmt: skip
    several = fits(lowest) or {}
    assert {"ppo.micro_batch_tokens", "training.recompute"} & several.keys()
    assert fits(1) is None
    assert find_remedy(spec, needed, full) is not None


def test_gpus_are_found_by_their_drivers_name() -> None:
    for name, flops in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L40S", 362e12)):
        gpu = stated_gpu(name)
        assert gpu is not None
        assert gpu.flops == flops
    runs: list[dict[str, Any]] = [{"resources": {"dtype": "bfloat16"}}, {}, {"rollout": {"top_k": 20}}]
    fast, slow, filtered = (device_speed("NVIDIA A100-SXM4-80GB", "cuda", spec_with(**sections)) for sections in runs)
    assert fast is not None
    assert slow is not None
    assert filtered is not None
    assert fast.flops > 10 * slow.flops
    assert filtered.layer_s > 10 * slow.layer_s, "filters need the host at every token"


def test_more_cores_and_streaming_are_faster() -> None:
    def step(cores: int, intra: str) -> float:
        spec = spec_with(overlap={"intra_step": intra, "inter_step": "off"}, ppo={"batch_size": 32})
        return stages(spec, shapes_of(spec), CORE, Lengths(16, Endings(0.0, 0.005), 128), cores, gpu=False).step_s()

    assert step(4, "off") < step(2, "off") < step(1, "off")
    assert step(1, "per_chunk") == step(1, "off"), "one core does not stream"

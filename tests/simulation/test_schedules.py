"""Every schedule's times on virtual devices, worked out by hand, and the bubbles that follow from them.

Costs in µs: a decode round 1,000 and 100 a row; reading 50 a token and model; backward passes 100 a token. Prompts have one
token, which costs nothing before decoding because the last token of a sequence is the next round's input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from oppo_core.engine.state import Engine
from oppo_core.simulation.assemble import MemoryJournal, steps_of
from oppo_estimate.devices import Devices

Virtual = Callable[..., Engine]
DEFER = {"inter_step": "defer"}
PER_CHUNK = {"intra_step": "per_chunk"}


def windows(engine: Engine) -> list[float]:
    """Length of every step, µs."""
    return [step["timing_s/step"] * 1e6 for step in steps_of(engine)]


def spans(engine: Engine) -> list[tuple[str, str, float, float]]:
    """(device, phase, start, end) of every span that took time, µs."""
    assert isinstance(engine.journal, MemoryJournal)
    told = [payload for kind, payload in engine.journal.events if kind == "spans"]
    rows = [row for event in told for row in zip(event["device"], event["phase"], event["start_s"], event["end_s"], strict=True)]
    return [(device, phase, round(start * 1e6), round(end * 1e6)) for device, phase, start, end in rows if end > start]


def test_sequential_is_the_sum_of_its_stages(virtual: Virtual) -> None:
    engine = virtual({}, [3, 5])
    # Decoding 3 · 1,200 + 2 · 1,100, then three readings of 10 tokens, log-probs, the critic's and the actor's update: both
    # have kept the graph of their reading.
    assert windows(engine) == pytest.approx([5800 + 3 * 500 + 500 + 1000 + 1000])
    metrics = engine.journal.steps[0]  # type: ignore[attr-defined]
    assert metrics["bubble/gpu:0"] == pytest.approx(2500 / 9800)
    assert metrics["bubble/gpu:1"] == pytest.approx(7300 / 9800)
    assert metrics["overlap_factor"] == pytest.approx(1)
    assert metrics["decode_occupancy"] == pytest.approx(8 / (5 * 2))


def test_per_sequence_reads_an_answer_while_the_others_go_on(virtual: Virtual) -> None:
    engine = virtual({"intra_step": "per_sequence"}, [3, 5])
    # Sent at the end of its chunk, 4,700: three readings of 4 tokens. The other answer is sent at 5,800 and read by 6,700;
    # then the critic's update.
    assert windows(engine) == pytest.approx([6700 + 1500])
    assert [s for s in spans(engine) if s[1] == "reward-prefill"] == [
        ("gpu:1", "reward-prefill", 4700, 4900), ("gpu:1", "reward-prefill", 5800, 6100),
    ]  # fmt: skip


def test_per_chunk_leaves_only_the_last_chunk_to_read(virtual: Virtual) -> None:
    engine = virtual(PER_CHUNK, [3, 5])
    # The last token is read by 5,950. The forward pass of the critic's update ends at 6,450, log-probs at 6,300.
    assert windows(engine) == pytest.approx([6450 + 1000])
    assert sorted(spans(engine), key=lambda span: span[2:]) == [
        ("gpu:1", "reward-prefill", 0, 100), ("gpu:0", "decode", 0, 2400), ("gpu:1", "reference-prefill", 100, 200),
        ("gpu:1", "critic-prefill", 200, 300),  # prompts
        ("gpu:1", "reward-prefill", 2400, 2600), ("gpu:0", "decode", 2400, 4700),
        ("gpu:1", "reference-prefill", 2600, 2800), ("gpu:1", "critic-prefill", 2800, 3000),
        ("gpu:1", "reward-prefill", 4700, 4850), ("gpu:0", "decode", 4700, 5800), ("gpu:1", "reference-prefill", 4850, 5000),
        ("gpu:1", "critic-prefill", 5000, 5150), ("gpu:1", "reward-prefill", 5800, 5850), ("gpu:0", "actor-forward", 5800, 6300),
        ("gpu:1", "reference-prefill", 5850, 5900), ("gpu:1", "critic-prefill", 5900, 5950),
        ("gpu:1", "update-critic", 5950, 6450), ("gpu:0", "update-actor", 6300, 7300), ("gpu:1", "update-critic", 6450, 7450),
    ]  # fmt: skip
    metrics = engine.journal.steps[0]  # type: ignore[attr-defined]
    assert metrics["bubble/gpu:0"] == pytest.approx(150 / 7450)
    assert metrics["bubble/gpu:1"] == pytest.approx((7450 - 900 - 450 - 150 - 1500) / 7450)
    assert metrics["overlap_factor"] == pytest.approx((7300 + 3000) / 7450)
    assert metrics["idle_s/gpu:1/decode"] == pytest.approx((2100 + 1700) * 1e-6)
    assert metrics["idle_s/gpu:1/tail"] == pytest.approx(650e-6), "the last chunk has one row"
    assert metrics["idle_s/gpu:0/update"] == pytest.approx(150e-6)


def test_deferring_stops_at_the_second_finisher_and_reads_the_third_again(virtual: Virtual) -> None:
    engine = virtual(DEFER, [3, 5, 4, 2, 6], {"steps": 2})
    # Answers 0 and 2 are trained after four rounds. Then answer 1 (4 of 5 tokens) is read again, and is done in one round.
    first = 3 * 1300 + 1200 + 3 * 450 + 450 + 900 + 900
    second = 4 * 50 + 1300 + 1200 + 3 * 450 + 450 + 900 + 900
    assert windows(engine) == pytest.approx([first, second])
    steps = engine.journal.steps  # type: ignore[attr-defined]
    assert [step["oppo/deferred"] for step in steps] == [1, 1]
    assert steps[1]["oppo/deferred_token_share"] == pytest.approx(4 / 7)
    assert (steps[1]["oppo/age_max"], steps[1]["oppo/age_mean"]) == (1, 0.5)
    assert steps[1]["decode_occupancy"] == pytest.approx(5 / (2 * 3))


def test_keeping_the_cache_saves_reading_it_again(virtual: Virtual) -> None:
    recomputed, kept = (
        windows(virtual(DEFER | {"kv_after_update": choice}, [3, 5, 4, 2, 6], {"steps": 2})) for choice in ("recompute", "keep")
    )
    assert recomputed[0] == pytest.approx(kept[0])
    assert recomputed[1] - kept[1] == pytest.approx(4 * 50)


def test_both_overlaps(virtual: Virtual) -> None:
    engine = virtual(DEFER | PER_CHUNK, [3, 5, 4, 2, 6], {"steps": 2})
    # Step 1: decoded at 5,100, the rest is read by 5,850, critic until 7,200. Step 2, from there: the critic reads answer 1
    # again, and all three read two prompts, while the actor reads it; decoded at 9,900, read by 10,650, critic until 12,000.
    assert windows(engine) == pytest.approx([7200, 4800])
    assert ("gpu:1", "critic-prefill", 7400, 7750) in spans(engine)
    assert ("gpu:0", "actor-prefill", 7200, 7400) in spans(engine)


def test_without_a_critic_the_actor_is_trained_on_the_scorers_cores_too(virtual: Virtual, even: Callable[..., Devices]) -> None:
    grpo = {
        "ppo": {"algorithm": "grpo", "group_size": 2, "batch_size": 1, "critic_learning_rate": 1e-5},
        "models": {"critic": "actor"},
    }
    own, all_cores = (virtual(PER_CHUNK, [3, 5], grpo, devices=even(kind=kind)) for kind in ("gpu", "cpu"))
    # Decoding takes 5,800. Then log-probs, 10 tokens at 50, and the update, 10 at 100; the last token is read meanwhile.
    assert windows(own) == pytest.approx([5800 + 500 + 1000])
    assert windows(all_cores) == pytest.approx([5800 + 250 + 500])
    assert {(span[0], span[1]) for span in spans(all_cores) if span[1] == "update-actor"} == {
        ("cpu:0", "update-actor"), ("cpu:1", "update-actor"),
    }  # fmt: skip


def test_update_overlap_trains_the_finished_answer_during_the_tail(virtual: Virtual) -> None:
    engine = virtual(PER_CHUNK | {"chunk": {"size": 100}, "update_overlap": True}, [200, 300])
    # Answer 0 is done at 240 ms and read by 260. While answer 1 is decoded until 350, the actor reads it (201 · 50 µs), the
    # critic learns from it (201 · 150 µs), then the actor, with two backward passes (201 · 200 µs). What answer 1 needs is left.
    assert windows(engine) == pytest.approx([405_150])
    told = [span for span in spans(engine) if span[1].startswith("update")]
    assert sorted(told) == [
        ("gpu:0", "update-actor", 375_050, 405_150), ("gpu:1", "update-actor", 300_200, 340_400),
        ("gpu:1", "update-critic", 270_050, 300_200), ("gpu:1", "update-critic", 375_050, 405_150),
    ]  # fmt: skip


def test_prompts_count_in_the_limit_of_early_training(virtual: Virtual, even: Callable[..., Devices]) -> None:
    """Answer 0 is done after 200 rounds, in which 440 tokens may be trained: its row has 500, or 400."""
    trained = []
    for prompt in (300, 200):
        devices = even(workload=even().workload.model_copy(update={"prompt_tokens": prompt}))
        overlap = PER_CHUNK | {"chunk": {"size": 100}, "update_overlap": True}
        engine = virtual(overlap, [200, 300], {"rollout": {"max_prompt_tokens": prompt}}, devices=devices)
        windows(engine)
        trained.append(sum(span[:2] == ("gpu:1", "update-actor") for span in spans(engine)))
    assert trained == [0, 1]


def test_padding_decodes_and_reads_what_nobody_asked_for(virtual: Virtual, even: Callable[..., Devices]) -> None:
    engine = virtual({}, [3, 5], devices=even(padded=True))
    assert windows(engine) == pytest.approx([5 * 1200 + 3 * 12 * 50 + 12 * 50 + 12 * 100 + 12 * 100])


def test_shared_devices_take_turns(virtual: Virtual, even: Callable[..., Devices]) -> None:
    engine = virtual({}, [3, 5], devices=even(without_streaming="share"))
    # Everything but a round's fixed cost is twice as fast on two devices; both are always busy.
    assert windows(engine) == pytest.approx([5 * 1000 + (8 * 100 + 3 * 500 + 500 + 1000 + 1000) / 2])
    metrics = engine.journal.steps[0]  # type: ignore[attr-defined]
    assert (metrics["bubble/gpu:0"], metrics["bubble/gpu:1"]) == pytest.approx((0, 0))


def test_more_mini_batches_and_epochs(virtual: Virtual, even: Callable[..., Devices]) -> None:
    costs = even().costs
    dear = costs.model_copy(update={"actor": costs.actor.model_copy(update={"optimizer_us": 7.0})})
    engine = virtual({}, [3, 5], {"ppo": {"epochs": 2, "mini_batches": 2}}, devices=even(costs=dear))
    # No graph is kept: each epoch has a forward and a backward pass, and two optimizer steps.
    assert windows(engine) == pytest.approx([5800 + 3 * 500 + 500 + 2 * 1500 + 2 * 1500 + 4 * 7])


def test_overheads_are_told_as_what_they_are(virtual: Virtual, even: Callable[..., Devices]) -> None:
    overheads = {
        "prompt_us": 10, "weights_us": 20, "handover_us": 30, "handover_row_us": 1, "score_us": 40, "advantage_us": 2,
        "report_us": 60, "checkpoint_us": 1000,
    }  # fmt: skip
    devices = Devices.model_validate(even().model_dump() | {"overheads": overheads})
    engine = virtual(PER_CHUNK, [3, 5], {"steps": 2}, devices=devices)
    # Two prompts and new weights; hand-overs after chunks of two, two and one rows; scores after the log-probs; the report of
    # a step falls into the next one's window.
    before = 2 * 10 + 20
    decoded = before + 2400 + 32 + 2300 + 32 + 1100 + 31
    forward = decoded + 150 + 2 * 40 + 500  # of the critic's update: after the log-probs and the advantages
    assert forward > decoded + 500 + 8 * 2
    assert windows(engine) == pytest.approx([forward + 1000, 60 + forward + 1000])


def test_tail_batching_throws_the_third_away_and_trains_it_later(virtual: Virtual) -> None:
    engine = virtual({"inter_step": "tail_batch"}, [3, 5, 4, 2, 6, 9], {"steps": 3})
    # Answers 0 and 2 after four rounds, 3 and 4 after six (5 is cut off at six of nine); then 1 and 5 from nothing, Δ = 0.
    trained = [(3, 4), (2, 6), (5, 9)]
    decoded = [4 * 1000 + 11 * 100, 6 * 1000 + 14 * 100, 9 * 1000 + 14 * 100]
    rest = [(sum(lengths) + 2) * (3 * 50 + 50 + 100 + 100) for lengths in trained]
    assert windows(engine) == pytest.approx([d + r for d, r in zip(decoded, rest, strict=True)])
    steps = engine.journal.steps  # type: ignore[attr-defined]
    assert [step["oppo/wasted_tokens"] for step in steps] == [4, 6, 0]
    assert [step["oppo/queued"] for step in steps] == [1, 2, 0]
    assert [step["oppo/overcommit"] for step in steps] == [1, 1, 0]
    assert {step["oppo/deferred_token_share"] for step in steps} == {0}


def test_without_a_critic_its_device_reads_and_trains_nothing(virtual: Virtual) -> None:
    grpo = {"ppo": {"algorithm": "grpo", "group_size": 2, "batch_size": 1}, "overlap": {"overcommit": {"initial": 1, "max": 1}}}
    engine = virtual(DEFER, [5, 3, 2, 4], {"steps": 2}, grpo)
    # Group 1 (2 and 4 tokens) is done after four rounds, before group 0 (5 and 3), which needs one round more.
    first = 1000 * 4 + 100 * (4 + 3 + 2 + 4) + (6 + 2) * (2 * 50 + 50 + 100)
    assert windows(engine)[0] == pytest.approx(first)
    metrics = engine.journal.steps  # type: ignore[attr-defined]
    assert [step["oppo/deferred"] for step in metrics] == [2, 2]
    assert metrics[1]["response_length/mean"] == 4
    assert metrics[0]["decode_occupancy"] == pytest.approx(13 / (4 * 4))
    assert not [span for span in spans(engine) if "critic" in span[1]]


@pytest.mark.parametrize("overlap", [{}, {"intra_step": "per_sequence"}, PER_CHUNK, DEFER, DEFER | PER_CHUNK])
def test_no_idle_time_is_unknown(overlap: dict[str, Any], virtual: Virtual) -> None:
    engine = virtual(overlap, [3, 50, 4, 20, 6, 11], {"steps": 5, "overlap": {"max_age": 1}})
    for step in steps_of(engine):
        for device in ("gpu:0", "gpu:1"):
            idle = {key: seconds for key, seconds in step.items() if key.startswith(f"idle_s/{device}/")}
            assert idle[f"idle_s/{device}/unknown"] == 0
            assert sum(idle.values()) == pytest.approx(step[f"bubble/{device}"] * step["timing_s/step"])


def test_the_same_simulation_gives_the_same_figures(virtual: Virtual) -> None:
    one, other = (list(steps_of(virtual(DEFER | PER_CHUNK, [3, 50, 4], {"steps": 6}))) for _ in range(2))
    assert repr(one) == repr(other)

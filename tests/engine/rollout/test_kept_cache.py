"""`kv_after_update: keep`: the KV cache of deferred answers is kept across updates, and their tokens count as stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from oppo_contract.spec import ModelSpec
from oppo_core.models.model_io import load_model
from oppo_core.rollout.decoder import Decoder, DecodeSettings
from oppo_core.rollout.sequence import Sequence

KEEP = {"overlap": {"kv_after_update": "keep"}}
FILTERED = {"rollout": {"top_k": 35, "top_p": 0.97}}


def decoder(world: Any, keeps: bool, slots: int = 6) -> Decoder:
    actor = load_model(ModelSpec(path="actor"), "lm", [world.folder], torch.float64, 0)
    return Decoder(actor, DecodeSettings(3, 2, 0.9, 12, 60, 400, keeps_cache=keeps), slots)


def sequences(count: int, first: int = 0) -> list[Sequence]:
    return [Sequence(i, 0, np.asarray([3 + i % 30] * (1 + i % 12))) for i in range(first, first + count)]


def finish(decoder: Decoder) -> None:
    while decoder.live:
        decoder.round(1)


def test_cached_tokens_are_not_recomputed(world: Any) -> None:
    kept, first = decoder(world, True), sequences(4)
    assert kept.begin(first, 0) == sum(len(s.prompt) - 1 for s in first)
    for _ in range(5):
        kept.round(0)
    going_on = [s for s in first if not s.finished]
    fresh = sequences(2, 10)
    assert kept.begin([*going_on, *fresh], 1) == sum(len(s.prompt) - 1 for s in fresh)
    assert {s.kept_version for s in going_on} == {0}
    assert {s.kept_version for s in fresh} == {1}
    other = decoder(world, False)
    assert other.begin(going_on, 1) == sum(len(s.prompt) + s.length - 1 for s in going_on)


def test_with_the_same_weights_keeping_changes_no_token(world: Any) -> None:
    """Rows leave, join and move; each answer still attends to its own KV cache."""
    answers = []
    for keeps in (True, False):
        one, some = decoder(world, keeps), sequences(9)
        one.begin(some[:5], 0)
        for start in (5, 7, 9):
            for _ in range(6):
                one.round(0)
            one.begin([s for s in some[: start + 2] if not s.finished][:6], 0)
        finish(one)
        answers.append([(s.sequence_id, s.response) for s in some])
    assert answers[0] == answers[1]
    assert sum(len(response) for _, response in answers[0]) > 60


def test_a_kept_cache_affects_tokens_after_an_update(world: Any) -> None:
    """With new weights, an old KV cache gives other log-probs than recomputation; other answers are unaffected."""
    logprobs = []
    for keeps in (True, False):
        one, some = decoder(world, keeps), sequences(3)
        one.begin(some, 0)
        for _ in range(4):
            one.round(0)
        with torch.no_grad():
            for weight in one.actor.parameters():
                weight *= 1.05
        one.begin([s for s in some if not s.finished], 1)
        one.round(1)
        logprobs.append([s.behaviour_logprobs[4] for s in some if s.length > 4])
    assert len(logprobs[0]) == len(logprobs[1]) > 1
    assert all(abs(kept - fresh) > 1e-6 for kept, fresh in zip(*logprobs, strict=True))


def test_a_restarted_answer_does_not_read_its_old_cache(world: Any) -> None:
    one, first = decoder(world, True), sequences(1)
    one.begin(first, 0)
    for _ in range(5):
        one.round(0)
    again = first[0].restarted()
    one.begin([again], 1)
    finish(one)
    alone = decoder(world, True)
    fresh = sequences(1)
    alone.begin(fresh, 1)
    finish(alone)
    assert again.response == fresh[0].response
    assert again.kept_version == 1


def test_which_tokens_are_stale() -> None:
    sequence = Sequence(0, 0, np.asarray([3]), response=[5] * 5, token_versions=[1, 1, 2, 2, 3])
    assert [sequence.stale_tokens(version) for version in (1, 2, 3, 4)] == [0, 2, 4, 5]
    sequence.kept_version = 1
    assert [sequence.stale_tokens(version) for version in (1, 2, 3)] == [0, 5, 5]
    assert [sequence.reads_stale(version) for version in (1, 2)] == [False, True]
    sequence.kept_version = 3  # recomputed under version 3, for example after an interruption
    assert [sequence.stale_tokens(version) for version in (3, 4)] == [4, 5]


def test_tokens_of_this_step_after_a_kept_cache_carry_a_weight(world: Any, tmp_path: Path) -> None:
    run = world.run(world.spec({"steps": 6}, KEEP, {"overlap": {"intra_step": "off"}, "ppo": {"tis_cap": 50.0}}), tmp_path)
    found = 0
    for version, step in enumerate(run.steps):
        e = step.experience
        for row, sequence in enumerate(e.sequences):
            new = torch.tensor([v == version for v in sequence.token_versions])
            if sequence.cohort < version and bool(new.any()):
                found += 1
                assert bool(e.stale[row][e.mask[row]].all())
                assert float((e.weights[row][e.mask[row]][new] - 1).abs().max()) > 0, "its log-probs should differ"
    assert found > 2


def test_a_resume_may_turn_kept_caches_on_or_off(world: Any, tmp_path: Path) -> None:
    """Caches are recomputed when it is turned off, so only older tokens are stale; and vice versa."""
    changes = {"steps": 3, "checkpoints": {"every_steps": 3}, "overlap": {"intra_step": "off"}}
    for before, after in (("keep", "recompute"), ("recompute", "keep")):
        spec = world.spec(changes, {"overlap": {"kv_after_update": before}})
        run = world.run(spec, tmp_path / before)
        start = next((run.out / "checkpoints").glob("step-*"))
        spec = world.spec(changes, {"steps": 4, "overlap": {"kv_after_update": after}})
        (step,) = world.run(spec, tmp_path / f"then-{after}", resume=start).steps
        going_on = [s for s in step.experience.sequences if s.cohort < 3 and s.token_versions[-1] == 3]
        assert going_on, "nothing was carried over"
        for sequence in going_on:
            assert sequence.kept_version == (3 if after == "keep" else None)
            assert sequence.stale_tokens(3) == sum(v < 3 for v in sequence.token_versions)


def test_a_killed_and_resumed_run_is_bitwise_identical(world: Any, tmp_path: Path) -> None:
    """From every checkpoint of a run with answers in flight, including caches and supports."""
    spec = world.spec(KEEP, FILTERED, {"steps": 9, "checkpoints": {"every_steps": 3, "keep": 9}})
    whole = world.run(spec, tmp_path / "whole", inline=True)
    for step in (3, 6):
        start = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
        assert (start / "kept-cache.safetensors").exists()
        resumed = world.run(spec, tmp_path / f"from-{step}", inline=True, resume=start)
        assert any(s.reads_stale(step) for s in resumed.steps[0].experience.sequences), "no cache was carried over"
        for one, other in zip(whole.steps[step:], resumed.steps, strict=True):
            assert one.tokens == other.tokens
            assert torch.equal(one.experience.behaviour_logp, other.experience.behaviour_logp)
            assert torch.equal(one.experience.weights, other.experience.weights)
        for role in ("actor", "critic"):
            for name, weight in whole.weights(role).items():
                assert torch.equal(resumed.weights(role)[name], weight), f"{role} {name}"

"""Intra-step overlap changes when things are computed, never what: same tokens, same scores, same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from oppo_core.train import train_step
from oppo_core.update import overlapped

STEPS = 20
INTER = {
    "off": {"overlap": {"inter_step": "off"}, "ppo": {"epochs": 2, "mini_batches": 2}},
    "defer": {"overlap": {"inter_step": "defer"}, "rollout": {"temperature": 0.8}},
}
UPDATE = {"overlap": {"update_overlap": True}}
FILTERED = {"top_k": 35, "top_p": 0.97, "min_p": 0.001}
KEPT = {"kv_after_update": "keep"}
FREE: dict[str, Any] = {  # of a critic
    "models": {"critic": "actor"}, "ppo": {"critic_learning_rate": 1e-5, "batch_size": 4, "group_size": 2},
    "overlap": {"overcommit": {"initial": 2, "max": 3}},
}  # fmt: skip
GRPO = FREE | {
    "ppo": FREE["ppo"] | {"algorithm": "grpo", "epochs": 2, "mini_batches": 2, "kl": {"placement": "loss", "estimator": "k3+"}}
}
RLOO = FREE | {"ppo": FREE["ppo"] | {"algorithm": "rloo"}}
SHAPED = {
    "ppo": {
        "schedule": "cosine", "critic_schedule": "linear", "warmup_steps": 2, "value_warmup_steps": 3, "score_scale": 1.5,
        "length_penalty": 0.02, "length_penalty_from": 5, "score_clip": 2.0, "ema_decay": 0.7,
        "pretraining": {"data": "texts.jsonl", "sequences": 2, "coefficient": 0.1},
    },
}  # fmt: skip
# Name → settings of both runs, and extra settings of the overlapped run.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"streamed-{name}": (inter, {}) for name, inter in INTER.items()},
    "whole-answers": (INTER["defer"], {"overlap": {"intra_step": "per_sequence"}}),
    "update-off": ({"overlap": {"inter_step": "off"}}, UPDATE),
    "update-defer": (INTER["defer"], UPDATE),
    "update-per_sequence": (INTER["defer"], {"overlap": {"update_overlap": True, "intra_step": "per_sequence"}}),
    "update-everything-in-the-loss": (
        {"ppo": {"entropy_coefficient": 0.01, "kl": {"placement": "loss", "estimator": "k3"}, "tis": "all", "dual_clip": 3.0}},
        UPDATE,
    ),
    "update-unwhitened-in-small-passes": ({"ppo": {"whiten_advantages": False, "micro_batch_tokens": 60}}, UPDATE),
    "filtered-streamed": ({"rollout": FILTERED}, {}),
    "filtered-update": ({"rollout": FILTERED, "ppo": {"entropy_coefficient": 0.01}}, UPDATE),
    "kept-streamed": ({"overlap": KEPT}, {}),
    "kept-update": ({"overlap": KEPT, "rollout": FILTERED}, UPDATE),
    "update-scheduled-critic-first": (SHAPED, UPDATE),
    "grpo": (GRPO, {}),
    "rloo": (RLOO | {"overlap": {"inter_step": "off"}}, {}),
    "tail-batch": ({"overlap": {"inter_step": "tail_batch"}}, {}),
    "tail-batch-update": ({"overlap": {"inter_step": "tail_batch"}}, UPDATE),
}
QUICK = (
    "streamed-defer",
    "update-defer",
    "kept-streamed",
    "grpo",
)
ROLES = ("actor", "critic")


@dataclass(slots=True)
class Pair:
    """The same run with and without intra-step overlap, and the weights before step 1 by role."""

    off: Any
    on: Any
    first: dict[str, dict[str, Tensor]]


def spec_of(world: Any, inter: str, intra: str, *changes: Any) -> Any:
    return world.spec({"steps": STEPS, "overlap": {"intra_step": intra}}, INTER[inter], *changes)


@pytest.fixture(
    scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in sorted(PAIRS)]
)
def pair(request: pytest.FixtureRequest, world: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    out = tmp_path_factory.mktemp(request.param)
    both, on_only = PAIRS[request.param]
    off = world.spec({"steps": STEPS, "overlap": {"intra_step": "off"}}, both)
    on = world.spec({"steps": STEPS, "overlap": {"intra_step": "per_chunk"}}, both, on_only)
    first = {role: world.first_weights(off, role) for role in ROLES if role == "actor" or off.ppo.has_critic}
    with mock.patch.object(overlapped, "MIN_PASS_TOKENS", 20):  # these answers are few and short
        return Pair(world.run(off, out / "off", threads=1), world.run(on, out / "on", threads=2), first)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """L2 distance of two networks."""
    assert one.keys() == other.keys()
    return float(sum((one[name] - other[name]).double().square().sum() for name in one) ** 0.5)


def same_tokens(one: Any, other: Any) -> None:
    assert [step.tokens for step in one.steps] == [step.tokens for step in other.steps]


def test_identical_tokens_in_every_step(pair: Pair) -> None:
    assert pair.on.engine.layout.streams
    assert not pair.off.engine.layout.streams
    assert len(pair.on.steps) == len(pair.off.steps) == STEPS
    same_tokens(pair.off, pair.on)


def test_the_same_rewards_advantages_and_losses(pair: Pair) -> None:
    for off, on in zip(pair.off.steps, pair.on.steps, strict=True):
        for name in ("scores", "rewards", "advantages", "returns", "values", "reference_logp", "proximal_logp", "weights"):
            torch.testing.assert_close(getattr(on.experience, name), getattr(off.experience, name), rtol=1e-8, atol=1e-8)
        assert on.metrics == pytest.approx(off.metrics, rel=1e-7, abs=1e-9)


def test_update_overlap_trains_before_decoding_ends(pair: Pair) -> None:
    """Most steps have critic passes, and some have actor passes, in the scorer process during decoding."""
    if not pair.on.engine.spec.overlap.update_overlap:
        return
    early: dict[str, set[int]] = {"update-critic": set(), "update-actor": set()}
    for event in (event for event in pair.on.events if event.kind == "spans"):
        decoded = max(end for end, phase in zip(event.end_s, event.phase, strict=True) if phase == "decode")
        for device, phase, start in zip(event.device, event.phase, event.start_s, strict=True):
            if phase in early and device == "cpu:1" and start < decoded:
                early[phase].add(event.step)
    assert len(early["update-critic"]) >= STEPS // 2
    assert early["update-actor"]


@pytest.mark.parametrize("role", ROLES)
def test_the_same_weights_after_twenty_steps(pair: Pair, role: str) -> None:
    if role not in pair.first:
        assert not list(pair.on.out.rglob("critic*")), "there should be no critic"
        return
    off, on, first = pair.off.weights(role), pair.on.weights(role), pair.first[role]
    assert distance(off, first) > 0.02 * distance(first, {name: 0 * weight for name, weight in first.items()})
    assert distance(on, off) <= 1e-6 * distance(off, first)


def test_the_compared_runs_learn_and_defer(pair: Pair) -> None:
    kl = [float(step.experience.kl.sum(-1).mean()) for step in pair.off.steps]
    assert sum(kl[-5:]) / 5 > 1.0, "the policy hardly moved"
    ages = [s.age for step in pair.on.steps for s in step.experience.sequences]
    stale = sum(int(step.experience.stale.sum()) for step in pair.on.steps)
    deferring = pair.on.engine.spec.overlap.inter_step == "defer"
    assert (max(ages) > 0) == deferring
    assert (stale > 0) == deferring


def test_the_chunk_size_changes_nothing(world: Any, tmp_path: Path) -> None:
    """Chunks of one token, of a few, longer than any answer, and sizes that the tuner changes during the run."""
    tuner = {"controller": "tuner", "candidates": [2, 16], "explore_every": 2}
    chunks: dict[str, Any] = {"1": {"size": 1}, "7": {"size": 7}, "100": {"size": 100}, "tuned": tuner}
    runs = {
        name: world.run(
            spec_of(world, "defer", "per_chunk", {"steps": 10, "overlap": {"chunk": chunk}}), tmp_path / name, inline=True
        )
        for name, chunk in chunks.items()
    }
    sizes = {event.metrics["oppo/chunk_size"] for event in runs["tuned"].events if event.kind == "step"}
    assert sizes == {2, 8, 16}
    spec = spec_of(world, "defer", "per_chunk")
    for name in ("7", "100", "tuned"):
        same_tokens(runs["1"], runs[name])
        for role in ROLES:
            moved = distance(runs["1"].weights(role), world.first_weights(spec, role))
            assert distance(runs[name].weights(role), runs["1"].weights(role)) <= 1e-6 * moved


@pytest.mark.parametrize("inter", sorted(INTER))
def test_float32_agrees_from_the_same_state(world: Any, tmp_path: Path, inter: str) -> None:
    """In lockstep: before each step the overlapped engine gets the other's weights, so errors do not accumulate."""
    single = {"resources": {"dtype": "float32"}, "overlap": {"overcommit": {"controller": "fixed"}}}
    off = world.assemble(spec_of(world, inter, "off", single), tmp_path / "off")
    on = world.assemble(spec_of(world, inter, "per_chunk", single), tmp_path / "on")
    on.layout = world.inline_streaming()
    for number in range(8):
        on.actor.network.load_state_dict(off.actor.network.state_dict())
        on.scorers.trainer.network.load_state_dict(off.scorers.trainer.network.state_dict())
        with world.recorded() as steps:
            train_step(off, 0.0)
            train_step(on, 0.0)
        assert steps[0].tokens == steps[1].tokens, f"step {number + 1}"
        for name in ("proximal_logp", "behaviour_logp", "reference_logp", "values", "scores"):
            one, other = (getattr(step.experience, name) for step in steps)
            torch.testing.assert_close(other, one, rtol=0, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")

"""Evaluation: it changes nothing, gives the same for the same weights, and ends a run that is good enough or has gone astray."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from oppo_core.evaluation import evaluate, evaluator_of

HELD_OUT: dict[str, Any] = {"evaluation": {"prompts": "prompts.jsonl", "every_steps": 2, "count": 7}}
SHORT: dict[str, Any] = {"steps": 5, "resources": {"dtype": "float32"}, "logging": {"samples_per_step": 2}}


def told(run: Any) -> dict[int, dict[str, float]]:
    """`eval/…` by step."""
    steps = {event.step: event.metrics for event in run.events if event.kind == "step"}
    return {step: {k: v for k, v in metrics.items() if k.startswith("eval/")} for step, metrics in steps.items()}


@pytest.mark.parametrize("intra", ["off", "per_chunk"])
def test_training_is_bit_for_bit_the_same_with_and_without(world: Any, tmp_path: Path, intra: str) -> None:
    changes = {"overlap": {"intra_step": intra}}
    threads = 2 if intra == "per_chunk" else 1
    plain = world.run(world.spec(SHORT, changes), tmp_path / "plain", threads=threads)
    watched = world.run(world.spec(SHORT, changes, HELD_OUT), tmp_path / "watched", threads=threads)
    for role in ("actor", "critic"):
        one, other = plain.weights(role), watched.weights(role)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert [step.tokens for step in plain.steps] == [step.tokens for step in watched.steps]
    seen = told(watched)
    assert {step for step, metrics in seen.items() if "eval/score/mean" in metrics} == {2, 4, 5}
    assert {step for step, metrics in seen.items() if "eval/start/score/mean" in metrics} == {1}
    assert watched.engine.standing.evaluation == seen[5]["eval/score/mean"]
    assert seen[5]["eval/score/mean"] != seen[2]["eval/score/mean"], "training should have changed the answers"
    held_out = [s for event in watched.events if event.kind == "samples" for s in event.samples if s.held_out]
    assert [s.versions for s in held_out] == [(v, v) for v in (0, 2, 4, 5) for _ in range(2)]
    phases = {phase for event in watched.events if event.kind == "spans" for phase in event.phase}
    assert "eval" in phases


def test_the_same_weights_give_the_same_and_greedy_takes_the_likeliest(world: Any, tmp_path: Path) -> None:
    spec = world.spec(SHORT, HELD_OUT, {"evaluation": {"greedy": True}, "resources": {"dtype": "float64"}})
    engine = world.assemble(spec, tmp_path)
    answers, scores = evaluate(engine, engine.evaluator)
    again, same = evaluate(engine, engine.evaluator)
    assert [s.response for s in answers] == [s.response for s in again]
    assert scores.tolist() == same.tolist()
    assert len(scores) == 7
    for answer in answers:
        tokens = torch.from_numpy(answer.tokens())[None]
        positions = torch.arange(tokens.shape[1])[None]
        with torch.no_grad():
            likeliest = engine.actor.network.logits(engine.actor.network.hidden(tokens, positions))[0].argmax(-1)
        assert answer.response == likeliest[len(answer.prompt) - 1 : -1].tolist()
    assert engine.scorers.tracks == {}
    engine.scorers.close()


def test_sampled_answers_have_numbers_of_their_own(world: Any, tmp_path: Path) -> None:
    """With the weights of step 0 and the same prompts, they are others than training's, and the same in groups of any size."""
    spec = world.spec(
        SHORT, HELD_OUT, {"data": {"shuffle": False}, "evaluation": {"count": 6}, "resources": {"dtype": "float64"}}
    )
    run = world.run(spec.model_copy(update={"steps": 1}), tmp_path / "run")
    engine = world.assemble(spec, tmp_path / "engine")
    answers, _ = evaluate(engine, engine.evaluator)
    trained = run.steps[0].tokens
    assert sum(answers[i].response == trained[i] for i in trained if i < 6) <= 2
    engine.evaluator.rows = 4
    smaller, _ = evaluate(engine, engine.evaluator)
    assert [s.response for s in smaller] == [s.response for s in answers]
    engine.scorers.close()


def test_without_the_setting_there_is_none(world: Any) -> None:
    assert evaluator_of(world.spec(), [], None, None, None, None) is None


ENDINGS = {
    "target, evaluated": (
        HELD_OUT | {"budget": {"target_reward": -1e9, "stop_at_target": True}},
        0,
        "the evaluation's mean score",
    ),
    "target, trained": ({"budget": {"target_reward": -1e9, "stop_at_target": True}}, 1, "the mean score"),
    "a target that is only drawn": ({"budget": {"target_reward": -1e9}}, 3, "all steps are done"),
    "KL": ({"budget": {"max_kl": 1e-9}, "ppo": {"kl": {"estimator": "k2"}}}, 2, "is above budget.max_kl"),
    "hours": ({"budget": {"max_hours": 1e-9}}, 1, "the time budget"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_ends_early_and_says_why(world: Any, tmp_path: Path, name: str) -> None:
    changes, step, words = ENDINGS[name]
    tree = world.tree({"steps": 3, "overlap": {"intra_step": "off"}}, changes)
    status, events = world.main(tree, tmp_path)
    last = events[-1]
    assert (status, last.kind, last.outcome) == (0, "finished", "succeeded")
    assert words in last.reason
    assert last.step == step
    assert not any(math.isnan(event.score) for event in events if event.kind == "checkpoint" and event.score is not None)
    if last.step:
        assert events[-2].kind == "checkpoint"

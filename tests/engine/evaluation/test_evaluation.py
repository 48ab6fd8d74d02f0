"""Evaluation: it changes nothing, gives the same for the same weights, and ends a run that is good enough or has gone astray."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from oppo_contract.events import MAX_EVENT_BYTES, parse_event
from oppo_contract.spec import load_spec
from oppo_core.engine import step_report
from oppo_core.evaluation import schedule as evaluation_module
from oppo_core.evaluation.schedule import evaluate
from oppo_core.ppo import policy_objective
from oppo_core.rollout.held_out import HELD_OUT_OFFSET, build_evaluator
from oppo_core.scoring.scorers import ScorerSet
from oppo_core.training.optimizer import NonFiniteError
from oppo_estimate.memory import evaluation_rows

SEQUENTIAL: dict[str, Any] = {"overlap": {"intra_step": "off", "inter_step": "off"}}
HELD_OUT: dict[str, Any] = {"evaluation": {"prompts": "prompts.jsonl", "every_steps": 2, "count": 7}}
SHORT: dict[str, Any] = {"steps": 5, "resources": {"dtype": "float32"}, "logging": {"samples_per_step": 2}}


def newest(out: Path) -> Path:
    return max((out / "checkpoints").iterdir(), key=lambda path: (path / "state.json").stat().st_mtime_ns)


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
    assert watched.engine.run_score.evaluation == seen[5]["eval/score/mean"]
    assert seen[5]["eval/score/mean"] != seen[2]["eval/score/mean"], "training should have changed the answers"
    held_out = [s for event in watched.events if event.kind == "samples" for s in event.samples if s.held_out]
    assert [s.versions for s in held_out] == [(v, v) for v in (0, 2, 4, 5) for _ in range(2)]
    most = watched.engine.spec.rollout.max_new_tokens
    assert all(s.ending == "eos" or (s.ending, s.length) == ("length", most) for s in held_out)
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
    assert engine.scorers.sequences == {}
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
    assert build_evaluator(world.spec(), [], None, None) is None


ENDINGS = {
    "target, evaluated": (
        HELD_OUT | {"budget": {"target_reward": -1e9, "stop_at_target": True}},
        0,
        "the evaluation's mean score",
    ),
    "target, trained": ({"budget": {"target_reward": -1e9, "stop_at_target": True}}, 1, "the mean score"),
    "a target that is only drawn": ({"budget": {"target_reward": -1e9}}, 3, "all steps are done"),
    "KL": ({"budget": {"max_kl": 1e-9}, "ppo": {"learning_rate": 0.1}, **SEQUENTIAL}, 2, "is above budget.max_kl"),
    "entropy, patiently": ({"budget": {"min_entropy": 1e9, "patience": 2}}, 2, "for 2 steps"),
    "entropy": ({"budget": {"min_entropy": 1e9}}, 1, "nats a token, is below budget.min_entropy"),
    "a patience that is not used up": ({"budget": {"min_entropy": 1e9, "patience": 4}}, 3, "all steps are done"),
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
    evaluated = [e for e in events if e.kind == "step" and "eval/score/mean" in e.metrics]
    if "evaluation" in changes:
        lines = [line for e in events if e.kind == "log" for line in e.lines]
        assert any(line.startswith("eval/start/score/mean: ") for line in lines)
    assert not evaluated


@pytest.mark.parametrize("budget", [{"max_kl": 1e-9}, {"max_hours": 1e-9}], ids=lambda budget: next(iter(budget)))
def test_a_run_that_ends_early_evaluates_its_last_weights(world: Any, tmp_path: Path, budget: Any) -> None:
    """Told with all that the last step has told, and what the last checkpoint is judged by, as after the last step of all."""
    ppo = {"kl": {"estimator": "k2"}}
    tree = world.tree(SHORT, SEQUENTIAL, {"evaluation": {"prompts": "prompts.jsonl", "every_steps": 100}})
    status, events = world.main(world.tree(tree, {"budget": budget, "ppo": ppo, "checkpoints": {"every_steps": 1}}), tmp_path)
    step = events[-1].step
    assert status == 0
    assert 0 < step < SHORT["steps"]
    first, second = [e for e in events if e.kind == "step" and e.step == step]
    assert "eval/score/mean" not in first.metrics
    assert {k: v for k, v in first.metrics.items() if k != "timing_s/eval"}.items() <= second.metrics.items()
    checkpoint = [e for e in events if e.kind == "checkpoint"][-1]
    assert (checkpoint.step, checkpoint.score) == (step, second.metrics["eval/score/mean"])
    state = json.loads((tmp_path / checkpoint.folder / "state.json").read_text())
    assert (state["run_score"]["evaluated"], state["run_score"]["pending_metrics"]) == (step, {})


@contextmanager
def scored(said: Callable[[int], float | None]) -> Iterator[None]:
    """The reward says `said(number of the evaluation)` of its fourth answer, unless that is None."""
    plain, count = ScorerSet.wait_evaluate, [-1]

    def wait_evaluate(scorers: ScorerSet) -> dict[int, float]:
        count[0] += 1
        told = said(count[0])
        return plain(scorers) | ({} if told is None else {HELD_OUT_OFFSET + 3: told})

    with mock.patch.object(ScorerSet, "wait_evaluate", wait_evaluate):
        yield


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_evaluation_that_is_not_finite_takes_no_trained_step_back(world: Any, tmp_path: Path, value: float) -> None:
    """It is told as what it is and counts for nothing; the run computes what it would have computed."""
    every = {
        "checkpoints": {"every_steps": 1, "keep": 9, "keep_best": 1},
        "evaluation": HELD_OUT["evaluation"] | {"every_steps": 1},
    }
    spec = world.spec(SHORT, SEQUENTIAL, every, {"steps": 3, "ppo": {"on_nonfinite": "skip"}})
    plain = world.run(spec, tmp_path / "plain")
    with scored(lambda number: value if number == 2 else None):
        run = world.run(spec, tmp_path / "run")
    assert [e.step for e in run.events if e.kind == "step"] == [1, 2, 3]
    assert math.isnan(told(run)[2]["eval/score/mean"])
    assert told(run)[3] == told(plain)[3]
    (decision,) = [e for e in run.events if e.kind == "decision" and e.controller == "nonfinite"]
    assert (decision.step, decision.old, decision.new) == (2, 2, 2)
    assert "the evaluation after step 2: the score of held-out answer 3 is not finite" in decision.reason
    assert [e.score is None for e in run.events if e.kind == "checkpoint"] == [False, True, False]
    assert all(torch.equal(plain.weights("actor")[name], weight) for name, weight in run.weights("actor").items())
    assert run.engine.progress.nonfinite_steps == 0


def test_an_evaluation_that_is_not_finite_ends_the_run_by_default(world: Any, tmp_path: Path) -> None:
    spec = world.spec(SHORT, SEQUENTIAL, HELD_OUT)
    with scored(lambda number: math.nan if number == 1 else None), pytest.raises(NonFiniteError, match="evaluation after step 2"):
        world.run(spec, tmp_path)


def test_a_skipped_step_skips_its_evaluation(world: Any, tmp_path: Path) -> None:
    """Also when the run is stopped behind it; the weights of the last step are evaluated even if it was skipped."""
    every = {"evaluation": HELD_OUT["evaluation"] | {"every_steps": 1}, "ppo": {"on_nonfinite": "skip"}}
    spec = world.spec(SHORT, SEQUENTIAL, every, {"steps": 3})
    plain, events = policy_objective.policy_loss, tmp_path / "events.jsonl"

    def loss(*arguments: Any) -> Any:
        losses, clipped = plain(*arguments)
        return (losses * math.nan if b'"kind":"step"' in events.read_bytes() else losses), clipped

    with mock.patch.object(policy_objective, "policy_loss", loss):
        run = world.run(spec, tmp_path, should_stop=lambda: b'"nonfinite"' in events.read_bytes())
        assert run.engine.progress.step == 2
        resumed = world.run(spec, tmp_path, resume=newest(tmp_path))
    assert {step: sorted(m) for step, m in told(resumed).items()} == {
        1: sorted(told(run)[1]), 3: sorted(k for k in told(run)[1] if k.startswith("eval/") and "start" not in k),
    }  # fmt: skip


@pytest.mark.parametrize("at", [0, 2])
def test_a_stop_cuts_an_evaluation_off_at_its_next_chunk(world: Any, tmp_path: Path, at: int) -> None:
    """What it has answered is saved, and the resumed run tells the same, although it is stopped at every chunk."""
    few = {"evaluation": {"count": 5, "greedy": False}, "checkpoints": {"every_steps": 2, "keep": 99}, "ppo": {"batch_size": 3}}
    spec = world.spec(SHORT, SEQUENTIAL, HELD_OUT, few, {"steps": 3})
    plain = world.run(spec, tmp_path / "plain")
    out, cut, asked = tmp_path / "run", 0, [0]
    real = evaluation_module.evaluate

    def evaluating(engine: Any, evaluator: Any, should_stop: Any) -> Any:
        return real(engine, evaluator, lambda: asked.append(1) or True if engine.progress.step == at else False)

    run = None
    while run is None or run.reason != "all steps are done":
        before = len(asked)
        with mock.patch.object(evaluation_module, "evaluate", evaluating):
            run = world.run(spec, out, resume=newest(out) if run else None, should_stop=lambda seen=before: len(asked) > seen)
        cut += len(asked) > before
        assert len(asked) <= before + 1, "it went on although it was asked to stop"
    assert cut > 3
    events = [parse_event(line) for line in (out / "events.jsonl").read_bytes().splitlines()]
    run.events[:] = events
    wanted, ours = told(plain), told(run)
    assert ours.keys() == wanted.keys()
    for step in wanted:
        assert ours[step] == pytest.approx(wanted[step], rel=1e-9, nan_ok=True)
    scores = {e.step: e.score for e in plain.events if e.kind == "checkpoint"}
    assert {e.step: e.score for e in events if e.kind == "checkpoint" and e.step} == pytest.approx(scores, rel=1e-9)
    for role in ("actor", "critic"):
        one, other = plain.weights(role), run.weights(role)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_samples_beyond_an_events_size_are_several_events() -> None:
    """A supervisor drops an event above its limit, and with it every sample of the step."""
    written: list[dict[str, Any]] = []
    engine: Any = mock.Mock()
    engine.journal.write = lambda kind, **event: written.append(event)
    rows = [{"sequence_id": number, "response": "x" * 100_000} for number in range(12)]
    step_report.write_samples(engine, rows)
    assert [row for event in written for row in event["samples"]] == rows
    assert len(written) > 1
    assert all(len(json.dumps(event["samples"])) < MAX_EVENT_BYTES for event in written)


@pytest.mark.parametrize(("tokens", "rows"), [(56, 40), (1024, 32), (9216, 8)])
def test_few_short_prompts_are_decoded_together_and_long_ones_as_many_as_in_a_step(tokens: int, rows: int) -> None:
    spec = load_spec(
        {
            "name": "a", "steps": 1, "models": {"actor": {"path": "a"}, "reward": {"rule": "r"}}, "data": {"prompts": "p"},
            "rollout": {"max_prompt_tokens": 8, "max_new_tokens": tokens - 8}, "ppo": {"batch_size": 8},
        }
    )  # fmt: skip
    assert evaluation_rows(spec, 40) == rows

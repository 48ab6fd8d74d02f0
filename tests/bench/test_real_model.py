"""examples/smollm2 and its bench, as far as they need no download: prompts, the reward model's fit, paired differences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from examples.smollm2.prepare import prepare
from examples.smollm2.reward_model import UPPER_BLOCKS, Labelled, fit
from examples.smollm2.tasks import HELD_OUT, TASKS, TRAINED, split
from oppo_bench.studies.learning import EXAMPLES
from oppo_bench.studies.real_model import GOALS, Goal, in_standard_errors, outcome, results, sequential
from oppo_contract.events import Sample, SamplesEvent, StepEvent
from oppo_contract.yaml_text import load_yaml
from oppo_core.rules.math import verify

ENVELOPE: dict[str, Any] = {"producer": "engine", "seq": 1, "time": 0.0}


@pytest.mark.parametrize("task", list(TASKS))
def test_prompts_are_the_same_every_time_and_held_out_ones_are_apart(task: str) -> None:
    trained, held_out = split(TASKS[task](), seed=0)
    assert (trained, held_out) == split(TASKS[task](), seed=0)
    assert len(held_out) == HELD_OUT
    assert 100 <= len(trained) <= TRAINED
    assert not [record for record in held_out if record in trained]


def test_every_answer_of_the_arithmetic_task_is_right() -> None:
    for record in TASKS["arithmetic"]():
        question = record["prompt"][0]["content"].removeprefix("What is ").removesuffix("?")
        assert verify("", str(eval(question)), line=record) == 1.0


@pytest.mark.parametrize("task", list(GOALS))
def test_the_specs_evaluate_every_held_out_prompt_before_and_after(task: str) -> None:
    spec = load_yaml((EXAMPLES / f"smollm2/{task}.yaml").read_text())
    assert spec.evaluation is not None
    assert spec.evaluation.count == spec.logging.samples_per_step == HELD_OUT
    assert spec.steps % spec.evaluation.every_steps == 0
    plain = sequential(spec)
    assert (plain.overlap.intra_step, plain.overlap.inter_step) == ("off", "off")
    assert plain.model_copy(update={"overlap": spec.overlap}) == spec


def test_the_reward_model_learns_the_label_of_every_prefix() -> None:
    """The label is the share of one token among those so far: visible at every prefix, learned from few rows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=UPPER_BLOCKS + 1, num_attention_heads=2,
        num_labels=1, pad_token_id=0,
    )  # fmt: skip
    reward = LlamaForSequenceClassification(config).eval()
    frozen = reward.model.layers[0].mlp.up_proj.weight.clone()
    tokens = torch.randint(1, 8, (200, 12))
    labels = (tokens == 3).float().cumsum(1) / torch.arange(1, 13)
    labels[:, :2] = torch.nan  # a prompt
    losses = [loss for _, loss in fit(reward, Labelled(tokens, labels, torch.full((200,), 11)))]
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(reward.model.layers[0].mlp.up_proj.weight, frozen)


def sample(prompt: int, score: float, *, held_out: bool = True) -> Sample:
    return Sample(
        sequence_id=prompt, prompt="p", response="r", stale_response="", score=score, kl=0.0, length=1, age=0, versions=(0, 0),
        held_out=held_out,
    )  # fmt: skip


def test_scores_are_compared_prompt_by_prompt() -> None:
    """A rise of 1 ± 0.5 at every prompt is clear although the scores of the prompts differ by much more."""
    before = [10.0 * n for n in range(16)]
    after = [score + (0.5 if n % 2 else 1.5) for n, score in enumerate(before)]
    steps = [
        StepEvent(
            **ENVELOPE, step=n, elapsed_s=n, generated_tokens=1, device_seconds=1,
            metrics={"objective/kl": float(n), "timing_s/step": 2.0},
        )
        for n in range(1, 21)
    ]  # fmt: skip
    first = SamplesEvent(**ENVELOPE, step=0, samples=[sample(n, score) for n, score in enumerate(before)])
    trained = SamplesEvent(**ENVELOPE, step=3, samples=[sample(0, -99.0, held_out=False)])
    last = SamplesEvent(**ENVELOPE, step=20, samples=[sample(n, score) for n, score in reversed(list(enumerate(after)))])
    again = steps[-1].model_copy()  # as when a limit ends a run early: the last step with the evaluation's result
    run = outcome(0, [first, *steps, trained, last, again], 120.0)
    assert (run.before, run.after, run.minutes, run.kl, run.step_s) == (75.0, 76.0, 2.0, 19.5, 2.0)
    assert run.rise_se == pytest.approx(1 / (0.5 * (16 / 15) ** 0.5 / 4))
    assert run.good(Goal(2, 3), 20)
    assert not run.good(Goal(1, 3), 20)
    assert not run.good(Goal(2, 3), 19)
    assert {row.name for row in results("sentiment", [run], [run])} >= {
        "sentiment/seed0/rise_se", "sentiment/seed0/minutes", "sentiment/seed0/kl", "sentiment/sequential_over_oppo",
    }  # fmt: skip


def test_equal_rises_have_no_standard_error() -> None:
    assert in_standard_errors([0.0, 0.0]) == 0.0
    assert in_standard_errors([1.0, 1.0]) == math.inf


def test_prompts_that_exist_are_kept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "notes.jsonl").write_text("mine\n")
    prepare(tmp_path, seed=1)
    assert (tmp_path / "notes.jsonl").read_text() == "mine\n"
    assert len((tmp_path / "notes-heldout.jsonl").read_text().splitlines()) == HELD_OUT
    assert "apache-2.0" in (tmp_path / "model" / "README.md").read_text()

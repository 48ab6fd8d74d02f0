"""PPO learns the letters task on a learned reward model, judged by the rule on held-out prompts: one seed of the bench."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.letters.learning import Evaluation, evaluate, read_prompts
from examples.letters.prepare import Settings, prepare
from oppo_bench.studies.learning import KL_LIMIT_NATS, RISE_WANTED_SE, VARIANTS, outcome, table, train

SEED, STEPS = 0, 30
TASK = Settings(train_prompts=800, pretraining_answers=4000, compared_prompts=600, sampled_answers=256)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the letters task, trained less than the examples' but to the end."""
    root = tmp_path_factory.mktemp("models")
    prepare(root / "letters", TASK, lambda share, doing: None)
    return root


@pytest.fixture(scope="module")
def before(models: Path) -> Evaluation:
    """The pre-trained actor's held-out answers."""
    return evaluate(models / "letters" / "actor", read_prompts(models / "letters" / "heldout.jsonl"))


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_rule_score_rises_by_more_than_five_standard_errors(
    variant: str, models: Path, before: Evaluation, tmp_path: Path
) -> None:
    steps = train(variant, SEED, STEPS, models, tmp_path / "run")
    prompts = read_prompts(models / "letters" / "heldout.jsonl")
    after = evaluate(tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}" / "actor", prompts)
    result = outcome(variant, SEED, before, after, steps)
    assert result.rise_se > RISE_WANTED_SE, table([result])
    assert result.kl_nats <= KL_LIMIT_NATS, table([result])
    assert result.p95_ratio > 0.6, table([result])

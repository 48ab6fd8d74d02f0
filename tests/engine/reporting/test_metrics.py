"""Every metric that the engine emits is explained in docs/metrics.md, and every one explained there is emitted."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oppo_contract.spec import Ppo, load_spec
from oppo_core.ppo.experience import build_experience
from oppo_core.ppo.reward_shaping import ScoreMoments
from oppo_core.ppo.scored import Scored
from oppo_core.reporting.metrics import Cohorts, experience_metrics
from oppo_core.rollout.sequence import Sequence

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
VALUES = {f"critic/{name}/{kind}" for name in ("returns", "values") for kind in ("mean", "max", "min")} | {
    "critic/vf_explained_var"
}
# What drivers, torch and vLLM tell of a GPU (tests/engine/trace/test_gpu_stats.py, test_vllm_runs.py).
ON_A_GPU = re.compile("nvml/|gpm/|perf/max_memory_|perf/mfu/|perf/hand_over_gb|oppo/reward_cached_share")
ROW = re.compile(r"^\|(?P<names>[^|]+)\|[^|]+\|[^|]+\|$")


def documented() -> dict[str, re.Pattern[str]]:
    """Names in the first column of the page's metric tables, braces expanded, as patterns; what a step emits stands first."""
    patterns = {}
    for line in PAGE.read_text().partition("### Phases")[0].splitlines():
        row = ROW.match(line)
        for name in re.findall(r"`([^`]+)`", row["names"]) if row else []:
            for plain in expanded(name):
                pattern = (
                    re.escape(plain)
                    .replace(r"\{device\}", r"[a-z]+:\d+")
                    .replace(r"\{cause\}", "[a-z]+")
                    .replace(r"\{n\}", "[0-9]+")
                )
                patterns[plain] = re.compile(pattern)
    return patterns


def expanded(name: str) -> list[str]:
    """`a/{x,y}` as `a/x` and `a/y`."""
    choice = re.search(r"\{([^{}]*,[^{}]*)\}", name)
    if choice is None:
        return [name]
    return [
        done for part in choice[1].split(",") for done in expanded(name[: choice.start()] + part.strip() + name[choice.end() :])
    ]


@pytest.fixture(scope="module")
def emitted(world: Any, sequential_run: Any, oppo_run: Any, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    changes = {
        "steps": 2, "ppo": {"pretraining": {"data": "texts.jsonl", "sequences": 2}},
    }  # fmt: skip
    tree = world.tree(changes, {"models": {"critic": "actor"}})
    tree["models"]["reward"] = {"parts": [{"model": {"path": "reward"}, "weight": weight} for weight in (1.0, 0.5)]}
    mixed = world.run(load_spec(tree), tmp_path_factory.mktemp("mixed"), threads=1)
    held_out = {"evaluation": {"prompts": "prompts.jsonl", "count": 3}}
    tail = world.run(world.spec({"steps": 2, "overlap": {"inter_step": "tail_batch"}}, held_out), tmp_path_factory.mktemp("tail"))
    free = {"algorithm": "rloo", "group_size": 2, "batch_size": 4, "critic_learning_rate": 1e-5}
    groups = world.run(
        world.spec({"steps": 1, "models": {"critic": "actor"}, "ppo": free}), tmp_path_factory.mktemp("groups")
    )  # fmt: skip
    runs = (sequential_run, oppo_run, mixed, tail, groups)
    return {name for run in runs for e in run.events if e.kind == "step" for name in e.metrics}


def test_every_emitted_metric_is_documented(emitted: set[str]) -> None:
    patterns = documented().values()
    assert {name for name in emitted if not any(p.fullmatch(name) for p in patterns)} == set()


def test_every_documented_metric_is_emitted(emitted: set[str]) -> None:
    missing = {name for name, p in documented().items() if not any(p.fullmatch(e) for e in emitted)}
    assert {name for name in missing if not ON_A_GPU.match(name)} == set()


def test_the_figures_of_a_step_fit_each_other(oppo_run: Any) -> None:
    steps = [e for e in oppo_run.events if e.kind == "step"]
    for step, told in zip(oppo_run.steps, steps, strict=True):
        metrics, mask = told.metrics, step.experience.mask
        lengths = mask.sum(-1).tolist()
        assert metrics["response_length/mean"] == pytest.approx(np.mean(lengths))
        assert metrics["perf/total_num_tokens"] == sum(lengths)
        assert metrics["critic/score/min"] <= metrics["critic/score/mean"] <= metrics["critic/score/max"]
        assert metrics["objective/scores"] == pytest.approx(metrics["critic/score/mean"])
        assert metrics["objective/rlhf_reward"] == pytest.approx(
            metrics["objective/scores"] - metrics["objective/kl_coefficient"] * metrics["objective/kl"]
        )
        assert metrics["oppo/deferred_token_share"] == pytest.approx(float(step.experience.stale.sum()) / sum(lengths))
        assert metrics["oppo/deferred_share"] == pytest.approx(np.mean([s.age > 0 for s in step.experience.sequences]))
        assert 0 < metrics["oppo/ess"] <= 1 + 1e-12
        assert 0 < metrics["decode_occupancy"] < 1.5, "above 1 only while Δ has just been lowered"
    assert [e.generated_tokens for e in steps] == np.cumsum([e.metrics["perf/total_num_tokens"] for e in steps]).tolist()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_one_unlikely_token_does_not_dominate_the_reported_kl(estimator: str) -> None:
    """A policy that is sure samples a token of probability 1e-5 now and then; k3 counts 5e4 nats for it, k1 −11."""
    ppo = Ppo.model_validate({"batch_size": 2, "kl": {"estimator": estimator}})
    sequences = [Sequence(n, 0, np.arange(3, 6), [5, 6], [0.0, 0.0], [0, 0]) for n in range(2)]
    policy = [torch.tensor([-0.1, -0.1]), torch.tensor([-0.1, math.log(1e-5)])]
    scored = [Scored(0.0, np.full(2, -0.6), np.zeros(2)) for _ in sequences]
    experience = build_experience(sequences, policy, scored, ppo, 0.1, 0, ScoreMoments())
    metrics = experience_metrics(experience, 0.1, 2)
    assert metrics["objective/kl"] == pytest.approx((3 * 0.5 + math.log(1e-5) + 0.6) / 2, rel=1e-6)
    assert metrics["objective/non_score_reward"] < -1, "the penalty has the estimator that the spec names"


def test_without_a_critic_nothing_tells_of_one(world: Any, tmp_path: Path) -> None:
    changes = {"ppo": {"algorithm": "grpo", "group_size": 2, "critic_learning_rate": 1e-5}, "models": {"critic": "actor"}}
    run = world.run(world.spec({"steps": 2}, changes), tmp_path, inline=True)
    told = {name for e in run.events if e.kind == "step" for name in e.metrics}
    marked = VALUES | {"critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "critic/lr"}
    assert not marked & told
    assert {"critic/score/mean", "critic/rewards/mean", "critic/advantages/mean"} <= told
    assert {name for name in documented() if "*PPO*" in row_of(name)} == marked
    assert not any(role == "critic" for e in run.events if e.kind == "spans" for role in e.role)


def row_of(name: str) -> str:
    """The page's row about a metric."""
    rows = (line for line in PAGE.read_text().splitlines() if ROW.match(line))
    return next(row for row in rows if any(name in expanded(told) for told in re.findall(r"`([^`]+)`", row.split("|")[1])))


def test_length_bias_compares_with_the_newest_cohort_that_is_complete() -> None:
    cohorts = Cohorts()

    def ended(cohort: int, length: int) -> Sequence:
        return Sequence(0, 0, np.asarray([1]), response=[5] * length, cohort=cohort)

    cohorts.begin(0, 2)
    cohorts.begin(1, 1)
    assert math.isnan(cohorts.newest_mean)
    cohorts.finish([ended(0, 10)])
    assert math.isnan(cohorts.newest_mean), "one of the cohort is still being written"
    cohorts.finish([ended(1, 4)])
    assert cohorts.newest_mean == 4
    cohorts.finish([ended(0, 30)])
    assert cohorts.newest_mean == 4, "an older cohort must not replace a newer one"

"""Dynamic sampling: groups of equal scores are replaced; the rest is what sampling without overlap would have kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

G = 3
# Scores become their sign, so that many groups of three are uniform.
SIGNS = {
    "steps": 4, "models": {"critic": "actor"}, "checkpoints": {"every_steps": 1, "keep": 99},
    "ppo": {
        "algorithm": "rloo", "batch_size": 4, "group_size": G, "critic_learning_rate": 1e-5, "kl": {"coefficient": 0.0},
        "score_scale": 1000.0, "score_clip": 0.5,
    },
}  # fmt: skip
OVERLAPS = {
    "sequential": ({"overlap": {"inter_step": "off", "intra_step": "off"}}, False),
    "inter": ({"overlap": {"intra_step": "off"}}, False),
    "both": ({}, True),
}


def metrics_of(run: Any) -> list[dict[str, float]]:
    return [event.metrics for event in run.events if event.kind == "step"]


def groups_of(step: Any) -> dict[int, list[float]]:
    """Shaped scores of the trained groups."""
    scores = step.experience.scores.view(-1, G).tolist()
    return {s.sequence_id // G: scores[n] for n, s in enumerate(step.experience.sequences[::G])}


def test_the_batch_is_the_first_groups_with_variance(world: Any, tmp_path: Path) -> None:
    """In the order of the prompts, found by decoding many groups under the same weights without dynamic sampling."""
    sequential = OVERLAPS["sequential"][0]
    many = world.run(world.spec(SIGNS, sequential, {"steps": 1, "ppo": {"batch_size": 24}}), tmp_path / "many")
    scores = groups_of(many.steps[0])
    varied = [number for number, row in scores.items() if len(set(row)) > 1]
    run = world.run(world.spec(SIGNS, sequential, {"steps": 1, "ppo": {"dynamic_sampling": 20}}), tmp_path / "run")
    assert list(groups_of(run.steps[0])) == varied[:4] != [0, 1, 2, 3]
    assert all(groups_of(run.steps[0])[number] == scores[number] for number in varied[:4])
    (metrics,) = metrics_of(run)
    assert (metrics["oppo/replaced_groups"], metrics["oppo/uniform_groups"]) == (varied[3] + 1 - 4, 0)
    assert metrics_of(many)[0]["oppo/uniform_groups"] == 24 - len(varied)


@pytest.mark.parametrize("name", OVERLAPS)
def test_every_group_is_trained_once_or_replaced(world: Any, tmp_path: Path, name: str) -> None:
    changes, inline = OVERLAPS[name]
    run = world.run(world.spec(SIGNS, changes, {"ppo": {"dynamic_sampling": 20}}), tmp_path, inline=inline)
    trained = [number for step in run.steps for number in groups_of(step)]
    replaced = sum(metrics["oppo/replaced_groups"] for metrics in metrics_of(run))
    pool = run.engine.pool
    assert len(trained) == len(set(trained)) == 16
    assert replaced > 0
    assert pool.started == G * (len(trained) + replaced) + pool.unconsumed
    assert all(metrics["oppo/uniform_groups"] == 0 for metrics in metrics_of(run))
    assert set(run.engine.scorers.sequences) <= {s.sequence_id for s in pool.sequences}, "replaced responses keep no cache"
    if name == "both":
        assert any(s.age > 0 for step in run.steps for s in step.experience.sequences)


def test_after_the_last_replacement_equal_scores_are_trained(world: Any, tmp_path: Path) -> None:
    run = world.run(world.spec(SIGNS, {"steps": 8, "ppo": {"dynamic_sampling": 1}}), tmp_path, inline=True)
    told = metrics_of(run)
    assert len(told) == 8
    assert any(metrics["oppo/uniform_groups"] > 0 and metrics["oppo/replaced_groups"] > 0 for metrics in told)
    for step, metrics in zip(run.steps, told, strict=True):
        assert sum(len(set(row)) == 1 for row in groups_of(step).values()) == metrics["oppo/uniform_groups"]
        assert metrics["oppo/replaced_groups"] <= 4


def test_a_run_stopped_between_chunks_trains_the_same_groups(world: Any, tmp_path: Path) -> None:
    spec = world.spec(SIGNS, {"steps": 3, "ppo": {"dynamic_sampling": 20}})
    whole = world.run(spec, tmp_path / "whole", inline=True)
    trained, resume, attempts = [], None, 0
    while len(trained) < 3:
        calls = iter(range(10**6))
        attempts += 1
        out = tmp_path / str(attempts)
        part = world.run(spec, out, inline=True, resume=resume, should_stop=lambda calls=calls: next(calls) >= 3)
        trained += part.steps
        resume = sorted((out / "checkpoints").iterdir())[-1]
    assert attempts > 3
    assert [groups_of(step) for step in trained] == [groups_of(step) for step in whole.steps]
    for one, two in zip(trained, whole.steps, strict=True):
        assert one.tokens == two.tokens
        torch.testing.assert_close(one.experience.advantages, two.experience.advantages, rtol=0, atol=1e-9)

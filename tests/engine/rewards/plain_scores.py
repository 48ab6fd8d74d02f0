"""Specs with a given reward, and scores computed with transformers' own classifier."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from oppo_contract.spec import RunSpec, load_spec
from tests.engine.models.architectures import full_precision


def spec_with_reward(world: Any, reward: Any, *changes: Any) -> RunSpec:
    """The world's spec with this `models.reward`."""
    tree = world.tree({"steps": 3, "models": {"critic": "actor"}}, *changes)
    return load_spec(tree | {"models": tree["models"] | {"reward": reward}})


def trained(run: Any) -> list[tuple[Any, float]]:
    """Every trained sequence with its score."""
    return [pair for s in run.steps for pair in zip(s.experience.sequences, s.experience.scores.tolist(), strict=True)]


@cache
def plain_model(folder: Path) -> Any:
    """Transformers' own classifier, float64."""
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


@torch.no_grad()
def plain_score(folder: Path, ids: list[int]) -> float:
    """Its score of one row."""
    with full_precision():
        return float(plain_model(folder)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 0])

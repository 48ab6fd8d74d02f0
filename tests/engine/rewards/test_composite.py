"""Composite rewards: the weighted sum of parts in every mode, and refusal before the first step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.spec import ModelSpec, load_spec
from oppo_core.models.model_io import load_model
from oppo_core.rewards.registry import find_rule
from oppo_core.rewards.rule import RuleReward
from oppo_core.rollout.tokenizer import FileCodec
from oppo_core.scoring.build import build_scorers
from oppo_core.trace.recorder import Recorder
from tests.engine.rewards.plain_scores import plain_score, spec_with_reward, trained
from tests.engine.rewards.reward_server import RewardServer, expected_score

CPU = torch.device("cpu")
WEIGHTS = (0.7, -2.0, 1.5, 0.3)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"model": {"path": "without-tokenizer"}, "reads": "text"}, "cannot be read"),
        ({"model": {"path": "other-tokens"}}, "set reads: text"),
        ({"model": {"tiny": {"context": 128}}, "reads": "chat"}, "has no chat template"),
        ({"rule": "os:getcwd"}, "there is no rule os:getcwd"),
        ({"http": {"url": "http://127.0.0.1:9/x"}}, "OPPO_REWARD_HOSTS=127.0.0.1:9"),
        ({"parts": [{"rule": "letters:score"}, {"rule": "letters:best"}]}, "there is no rule letters:best"),
    ],
)
def test_unusable_rewards_are_refused_before_the_first_step(world: Any, tmp_path: Path, reward: Any, words: str) -> None:
    shutil.copytree(world.folder / "reward", tmp_path / "without-tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    tree = json.loads(spec_with_reward(world, reward).model_dump_json())
    status, events = world.main(tree, tmp_path / "out", "--root", tmp_path)
    assert status == 1
    assert {event.kind for event in events} <= {"log", "finished"}
    assert words in events[-1].reason


@pytest.mark.parametrize(
    "change",
    [
        {"models": {"reward": {"parts": [{"rule": "letters:score"}, {"model": {"path": "gone"}}]}, "critic": "actor"}},
        {"models": {"reward": {"rule": "letters:score"}, "critic": "actor", "reference": {"path": "gone"}}},
        {"models": {"reward": {"rule": "letters:score"}, "critic": {"path": "gone"}}},
    ],
    ids=["another part", "reference", "critic"],
)
def test_rewards_are_closed_when_a_model_is_missing(
    world: Any, rules: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    closed: list[RuleReward] = []
    monkeypatch.setattr(RuleReward, "close", lambda reward: closed.append(reward))
    tree = world.tree(change)
    tree["models"]["reward"].pop("model", None)
    with pytest.raises(ModelFolderError, match="gone"):
        build_scorers(load_spec(tree), [world.folder], CPU, None, None, None, None, False, Recorder(("cpu:0",)))
    assert len(closed) == 1


def parts_of(server: RewardServer, text_model: Path) -> Any:
    """One part of each kind."""
    sources: list[dict[str, Any]] = [
        {"model": {"path": "reward"}}, {"rule": "test:few"}, {"http": {"url": server.url, "answers_a_request": 2}},
        {"model": {"path": str(text_model)}, "reads": "text"},
    ]  # fmt: skip
    return {"parts": [source | {"weight": weight} for source, weight in zip(sources, WEIGHTS, strict=True)]}


def oracle(world: Any, text_model: Path) -> Callable[[Any], list[float]]:
    """Each part's raw score of a sequence, computed alone and at once."""
    codec, tokenizer = FileCodec(world.folder / "actor"), PreTrainedTokenizerFast.from_pretrained(text_model)
    network = load_model(ModelSpec(path="reward"), "scalar", [world.folder], torch.float64, 0)
    rule = find_rule("test:few")

    @torch.no_grad()
    def scores(sequence: Any) -> list[float]:
        ids = torch.from_numpy(sequence.tokens())[None]
        prompt, response = codec.decode(sequence.prompt.tolist()), codec.decode(sequence.response)
        hidden = network.hidden(ids, torch.arange(ids.shape[1])[None])
        text = tokenizer(codec.decode(ids[0].tolist()))["input_ids"]
        return [
            float(network.scalar(hidden[0, -1])), rule(prompt, response),
            expected_score({"response": response, "ended": sequence.ended_by_eos}), plain_score(text_model, text),
        ]  # fmt: skip

    return scores


MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "sequential": (1, {"overlap": {"intra_step": "off"}}),
    "per_chunk": (2, {"overlap": {"intra_step": "per_chunk"}}),
    "update_overlap": (2, {"overlap": {"update_overlap": True}}),
}


@pytest.mark.usefixtures("spawned_scorers")  # which see the environment
@pytest.mark.parametrize("overlapped", ["per_chunk", pytest.param("update_overlap", marks=pytest.mark.full)])
def test_the_weighted_sum_of_parts_in_every_mode(
    world: Any, rules: Path, server: RewardServer, text_model: Path, tmp_path: Path, overlapped: str
) -> None:
    runs = {}
    for name in ("sequential", overlapped):
        threads, changes = MODES[name]
        spec = spec_with_reward(world, parts_of(server, text_model), {"rollout": {"stop_tokens": [9, 17]}}, changes)
        runs[name] = world.run(spec, tmp_path / name, threads=threads)
    assert {s.ending for s, _ in trained(runs["sequential"])} >= {"stop", "eos"}
    scores = oracle(world, text_model)
    for step in runs["sequential"].steps:
        raw = [scores(sequence) for sequence in step.experience.sequences]
        sums = [sum(weight * score for weight, score in zip(WEIGHTS, row, strict=True)) for row in raw]
        assert step.experience.scores.tolist() == pytest.approx(sums, abs=1e-10)
        for number, column in enumerate(zip(*raw, strict=True)):
            told = [step.metrics[f"critic/score_part/{number}/{which}"] for which in ("mean", "max", "min")]
            assert told == pytest.approx([sum(column) / len(column), max(column), min(column)], abs=1e-10)
    for plain, step in zip(runs["sequential"].steps, runs[overlapped].steps, strict=True):
        assert plain.tokens == step.tokens
        torch.testing.assert_close(step.experience.scores, plain.experience.scores, rtol=0, atol=1e-10)


def test_one_part_of_weight_one_equals_the_single_reward_bit_for_bit(world: Any, tmp_path: Path) -> None:
    single = world.run(spec_with_reward(world, {"model": {"path": "reward"}}), tmp_path / "single", inline=True)
    listed = world.run(spec_with_reward(world, {"parts": [{"model": {"path": "reward"}}]}), tmp_path / "listed", inline=True)
    assert single.steps[-1].metrics == listed.steps[-1].metrics
    for name, weight in single.weights("actor").items():
        assert torch.equal(weight, listed.weights("actor")[name])
    assert not any(name.startswith("critic/score_part") for name in listed.steps[-1].metrics)

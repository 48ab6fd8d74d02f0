"""`oppo bench trl`: what can be tested without TRL, which lives in an environment of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer

from oppo_bench.engine.memory import EngineMemory
from oppo_bench.engine.models import build_models, build_peer_models, roles, round_trip_prompts
from oppo_bench.engine.race import Plan
from oppo_bench.engine.workload import SIZES, VARIANTS, Lengths, Load, Size, build_spec, write_prompts
from oppo_bench.peer_environment import READY, TRL, PeerEnvironmentError, ensure_environment
from oppo_bench.trl.race import Peer, PeerError, Turn, config_for_trl, engine_lines, plan_heats, to_results, trl_memory
from oppo_cli.main import main
from oppo_contract.spec import ModelSpec
from oppo_core.models.model_io import load_model
from oppo_core.rollout.tokenizer import FileCodec

SMALL = Size.tiny(16, 1, 2)


def parameters(model: ModelSpec, head: str = "lm") -> int:
    """How many weights a model has."""
    return sum(weight.numel() for weight in load_model(model, head, [], torch.float32, 0).parameters())


@pytest.mark.parametrize("size", [SMALL, SIZES["M"]])
def test_the_shared_checkpoint_has_the_size_of_our_own_architecture(size: Size, tmp_path: Path) -> None:
    own, shared = build_models(size, tmp_path, 0), build_peer_models(size, tmp_path, 0)
    actor = ModelSpec.model_validate(shared["actor"])
    assert parameters(actor) == parameters(ModelSpec.model_validate(own["actor"]))
    folders = [Path(shared["actor"]["path"]), Path(shared["reward"]["model"]["path"])]
    assert FileCodec(folders[0]).digest == FileCodec(folders[1]).digest


def test_the_shared_reward_model_scores(tmp_path: Path) -> None:
    reward = ModelSpec.model_validate(build_peer_models(SMALL, tmp_path, 0)["reward"]["model"])
    network = load_model(reward, "scalar", [], torch.float32, 0)
    tokens = torch.tensor([[3, 4, 5]])
    scores = network.scalar(network.hidden(tokens, torch.arange(3)[None]))
    assert scores.shape == (1, 3)
    assert scores.abs().max() > 0


def test_figures_are_taken_repetition_by_repetition() -> None:
    blocks = {"trl": [[Turn(4.0, 100), Turn(2.0, 100)], [Turn(8.0, 100)]], "oppo": [[Turn(1.0, 200)], [Turn(1.0, 100)]]}
    named = {result.name: result for result in to_results("M/B16", blocks)}
    assert (named["M/B16/trl/us_per_token"].min, named["M/B16/trl/us_per_token"].max) == (30_000, 80_000)
    assert named["M/B16/trl/us_per_step"].min == 3_000_000
    assert (named["M/B16/oppo/speedup"].min, named["M/B16/oppo/speedup"].max) == (6, 8)


def test_grpo_is_compared_with_trls_grpo() -> None:
    turns = {"trl": 8.0, "oppo": 2.0, "grpo": 1.0, "trl_grpo": 6.0}
    named = {r.name: r.median for r in to_results("m/B16", {name: [[Turn(s, 100)]] for name, s in turns.items()})}
    assert {name: named[f"m/B16/{name}/speedup"] for name in turns} == {"trl": 1, "oppo": 4, "grpo": 6, "trl_grpo": 1}


def test_trl_gets_the_lengths_of_the_measured_steps_and_of_the_one_before(tmp_path: Path) -> None:
    load = Load("M", SMALL, 4, Lengths(3), max_age=2)
    prompts = write_prompts(tmp_path, 3)
    config = config_for_trl(load, Plan(2, 1, 1), build_peer_models(SMALL, tmp_path, 0), prompts)
    assert config["lengths"] == [load.lengths.of(number) for number in range(2 * 4, 5 * 4)]
    assert "lora" not in config


def test_grpo_on_a_published_model_has_the_same_batch(tmp_path: Path) -> None:
    load = Load("m", SMALL, 16, Lengths(0).for_published_model(), model=tmp_path)
    shared = {**roles({"path": "actor"}, {"path": "reward"}), "lora": {"rank": 16}}
    for name, variant, models, settings in engine_lines(load, shared, tmp_path):
        spec = build_spec(load, VARIANTS[variant], models, tmp_path / "prompts.jsonl", settings)
        assert spec.ppo.rows == 16, name
        assert (spec.ppo.group_size, spec.ppo.algorithm) == ((4, "grpo") if "grpo" in name else (1, "ppo"))
        assert spec.overlap.overcommit.max == (2 if "grpo" in name else 8)
    config = config_for_trl(load, Plan(1, 1, 1), shared, write_prompts(tmp_path, 0, load.prompt_tokens))
    assert config["lora"] == 16


def test_trainers_that_do_not_fit_together_run_in_heats_and_one_that_does_not_fit_alone_is_refused() -> None:
    racers = {"trl": EngineMemory(4, 9), "sequential": EngineMemory(4, 3), "oppo": EngineMemory(6, 3)}
    assert plan_heats("m", racers, 30) == [["trl", "sequential", "oppo"]]
    assert plan_heats("m", racers, 22) == [["trl", "sequential"], ["oppo"]]
    assert plan_heats("m", racers, 13) == [["trl"], ["sequential"], ["oppo"]]
    with pytest.raises(PeerError, match="a trainer needs about"):
        plan_heats("m", racers, 12)


def test_trls_memory_grows_with_logits_and_rows_a_pass(tmp_path: Path) -> None:
    load = Load("m", Size(576, 30, 9, 3, 1536, 49152, "llama", micro_batch_tokens=1024), 16, Lengths(0), model=tmp_path)
    ppo, four, grpo = (
        trl_memory(load, config, 3 * 10**9) for config in ({"rows_a_pass": 1}, {"rows_a_pass": 4}, {"rows_a_pass": 1, "group": 4})
    )
    logits = 4 * 16 * load.context * 49152
    assert (ppo.held, grpo.held) == (4 * 4 * load.size.parameters + logits, 4 * 2 * load.size.parameters + logits)
    assert four.working - 2 * logits == pytest.approx(4 * (ppo.working - 2 * logits))
    assert ppo.working - 2 * logits == pytest.approx(2 * (grpo.working - 2 * logits))


def test_round_tripped_prompts_are_the_same_as_text(tmp_path: Path) -> None:
    model = Path(build_peer_models(SMALL, tmp_path, 0)["actor"]["path"])
    prompts = write_prompts(tmp_path, 0, (3, 9))
    round_trip_prompts(prompts, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for line in prompts.read_text().splitlines():
        ids = json.loads(line)["prompt"]
        assert ids
        assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    refused = CliRunner().invoke(main, ["bench", "trl", "--model", str(tmp_path)])
    assert (refused.exit_code, "has no config.json of a model" in " ".join(refused.output.split())) == (2, True)


def test_a_peer_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    # This environment has no TRL.
    with pytest.raises(PeerError, match="No module named"):
        Peer(Path(sys.executable), {}, tmp_path / "peer")


def test_a_finished_environment_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / READY).write_text("\n".join((*TRL.first, *TRL.pins)))
    assert ensure_environment(tmp_path, TRL, print) == tmp_path / "bin" / "python"


def test_an_environment_that_cannot_be_made_is_not_taken_for_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PeerEnvironmentError, match="torch"):
        ensure_environment(tmp_path / "environment", TRL, print)
    assert not (tmp_path / "environment" / READY).exists()

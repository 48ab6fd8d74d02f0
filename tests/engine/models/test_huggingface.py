"""Hugging Face folders: uneven chunks equal one forward pass, and a whole run trains, is saved and is read back."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from oppo_contract.events import CheckpointEvent, FinishedEvent, StepEvent, parse_event
from oppo_contract.model_folder import ModelFolderError
from oppo_contract.spec import ModelSpec
from oppo_core.cli import main
from oppo_core.models import decode_weights
from oppo_core.models.cache import SlotCache
from oppo_core.models.model_io import load_model, save_actor
from oppo_core.rollout.tokenizer import load_codec

WORDS = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(29))]
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip
KINDS = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification),
    "llama": (LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification),
}


def write_tokenizer(folder: Path, words: list[str] = WORDS) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=sorted(KINDS))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with an actor, a reward model and prompts of one kind."""
    root = tmp_path_factory.mktemp(request.param)
    config, language_model, classifier = KINDS[request.param]
    torch.manual_seed(1)
    language_model(config(**SIZES)).save_pretrained(root / "actor")
    classifier(config(**SIZES, num_labels=1)).save_pretrained(root / "reward")
    for name in ("actor", "reward"):
        write_tokenizer(root / name)
    rows = [{"prompt": f"w{i} w{2 * i} w{3}"} for i in range(1, 9)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def spec_of(**changes: Any) -> dict[str, Any]:
    return {
        "name": "hugging", "steps": 3, "data": {"prompts": "prompts.jsonl"},
        "models": {"actor": {"path": "actor"}, "reward": {"model": {"path": "reward"}}, "critic": "reward"},
        "ppo": {"batch_size": 4, "learning_rate": 1e-3, "critic_learning_rate": 1e-3},
        "rollout": {"max_new_tokens": 32, "max_prompt_tokens": 8},
        "overlap": {"overcommit": {"initial": 2, "min": 1, "max": 2}, "chunk": {"size": 8}},
    } | changes  # fmt: skip


def run(root: Path, out: Path, spec: dict[str, Any], *more: str | Path) -> tuple[int, list[Any]]:
    out.mkdir(exist_ok=True)
    (out / "spec.json").write_text(json.dumps(spec))
    arguments = ["--spec", out / "spec.json", "--out", out, "--events", out / "events.jsonl", "--root", root, "--threads", "2"]
    status = main([str(a) for a in (*arguments, *more)])
    return status, [parse_event(line) for line in (out / "events.jsonl").read_bytes().splitlines()]


def test_uneven_chunks_equal_one_forward_pass(folders: Path) -> None:
    network = load_model(ModelSpec(path="actor"), "lm", [folders], torch.float64, 0)
    tokens = torch.randint(3, len(WORDS), (3, 30), generator=torch.Generator().manual_seed(2))
    everything = torch.arange(30).expand(3, 30)
    cache = SlotCache(network.cache_shape, 6, 40, next(iter(network.parameters())))
    slots, read = torch.tensor([5, 0, 3]), torch.tensor([0, 0, 0])
    with torch.no_grad():
        whole = network.hidden(tokens, everything)
        for sizes in ([7, 12, 3], [1, 1, 1], [9, 5, 16]):
            width = max(sizes)
            positions = (read[:, None] + torch.arange(width)).clamp_max(29)
            states = network.hidden(
                tokens.gather(1, positions), positions, cache.window(slots, positions, int(positions.max()) + 1)
            )
            for row, size in enumerate(sizes):
                start = int(read[row])
                torch.testing.assert_close(states[row, :size], whole[row, start : start + size], rtol=0, atol=1e-10)
            read += torch.tensor(sizes)
        other = tokens.clone()
        other[:, 0] += 1
        assert (network.hidden(other, everything)[:, -1] - whole[:, -1]).abs().max() > 1e-6, "the context must matter"


def test_saving_a_model_does_not_import_deepspeed(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that cannot be imported; transformers' own way of saving tries to."""
    files = {"deepspeed/__init__.py": "raise ValueError('imported')", "deepspeed-1.dist-info/METADATA": "Name: it\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    network = load_model(ModelSpec(path="actor"), "lm", [folders], torch.float32, 0)
    save_actor(network, tmp_path / "saved", None, 2, 0)
    with pytest.raises(ValueError, match="imported"):
        network.model.save_pretrained(tmp_path / "plainly")


def test_a_run_trains_and_its_actor_is_a_plain_folder(folders: Path, tmp_path: Path) -> None:
    status, events = run(folders, tmp_path / "out", spec_of())
    assert status == 0
    assert [e.step for e in events if isinstance(e, StepEvent)] == [1, 2, 3]
    assert isinstance(events[-1], FinishedEvent)
    assert events[-1].outcome == "succeeded"
    checkpoint = next(e for e in events if isinstance(e, CheckpointEvent))
    exported = tmp_path / "out" / checkpoint.folder / "actor"
    trained = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    start = AutoModelForCausalLM.from_pretrained(folders / "actor").state_dict()
    assert any(not torch.equal(trained[name], start[name]) for name in start), "training moved no weight"
    assert (exported / "tokenizer.json").exists()


def test_resumed_it_decodes_from_copies_of_weights_and_ends_with_the_same_bits(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters and deferred responses; a checkpoint has no copies."""
    monkeypatch.setattr(decode_weights, "LEAST_DECODE_COPY", 0)
    models = spec_of()["models"] | {"lora": {"rank": 4}}
    longer = {"rollout": {"max_new_tokens": 64, "max_prompt_tokens": 8}, "overlap": {"chunk": {"size": 4}}}
    spec = spec_of(models=models, steps=4, checkpoints={"every_steps": 2, "keep": 2}, **longer)
    product = decode_weights._Product
    with mock.patch.object(product, "use_copy", autospec=True, side_effect=product.use_copy) as copied:
        assert run(folders, tmp_path / "whole", spec)[0] == 0
        assert copied.call_count > 0
        start = tmp_path / "whole" / "checkpoints" / "step-00000002"
        pool = json.loads((start / "state.json").read_text())["pool"]
        assert any(row["response"] and not row["finished"] for row in pool), "no response was deferred"
        copied.reset_mock()
        assert run(folders, tmp_path / "resumed", spec, "--resume-from", start)[0] == 0
        assert copied.call_count > 0
    whole, resumed = (tmp_path / name / "checkpoints" / "step-00000004" for name in ("whole", "resumed"))
    names = sorted(file.relative_to(whole) for file in whole.rglob("*.safetensors"))
    assert any("actor" in str(name) for name in names)
    for name in names:
        torch.testing.assert_close(load_file(resumed / name), load_file(whole / name), rtol=0, atol=0)


def test_a_critic_may_start_from_the_language_model(folders: Path, tmp_path: Path) -> None:
    models = {"actor": {"path": "actor"}, "reward": {"model": {"path": "reward"}}, "critic": "actor"}
    overlap = {"intra_step": "off", "inter_step": "off"}
    status, events = run(folders, tmp_path / "out", spec_of(models=models, overlap=overlap, steps=1))
    assert status == 0
    assert sum(isinstance(e, StepEvent) for e in events) == 1


def test_wrong_roles_and_tokenizers_are_refused(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="sequence classifier"):
        load_model(ModelSpec(path="reward"), "lm", [folders], torch.float32, 0)
    swapped = ["<pad>", "<bos>", "<eos>", *reversed(WORDS[3:])]
    write_tokenizer(folders / "reward", swapped)
    try:
        status, events = run(folders, tmp_path / "out", spec_of())
    finally:
        write_tokenizer(folders / "reward")
    assert status == 1
    assert isinstance(events[-1], FinishedEvent)
    assert "tokenizer differs" in events[-1].reason


def test_padding_and_truncation_in_a_tokenizer_file_change_no_token(folders: Path, tmp_path: Path) -> None:
    """A trainer's last batch leaves both in the file."""
    file = folders / "actor" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    text = "w1 w2 " * 20
    plain = tokenizer.encode(text).ids
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=100)
    shutil.copytree(folders / "actor", tmp_path / "saved")
    tokenizer.save(str(tmp_path / "saved" / "tokenizer.json"))
    before, after = (load_codec(ModelSpec(path=str(folder)), []) for folder in (folders / "actor", tmp_path / "saved"))
    assert before.digest == after.digest
    assert after.encode(text) == before.encode(text) == plain

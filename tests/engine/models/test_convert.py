"""`oppo convert`: PyTorch and GGUF weights become a folder that a run loads, or a message says why not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from examples.own.make import architecture, build_tokenizer
from oppo_cli.main import main
from oppo_contract.spec import ModelSpec
from oppo_core.models.convert import convert_model
from oppo_core.models.model_io import load_model


class Payload:
    """Runs a command when it is unpickled by plain `pickle`."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


def llama() -> LlamaConfig:
    return architecture(build_tokenizer())


def write_pytorch(folder: Path, model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """A folder as it was usual before safetensors."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    torch.save({name: weight.to(dtype) for name, weight in model.state_dict().items()}, folder / "pytorch_model.bin")


def convert(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["convert", *map(str, arguments)])
    return result.exit_code, result.output


def test_pytorch_weights_become_a_folder_that_the_engine_loads(tmp_path: Path) -> None:
    model = LlamaForCausalLM(llama())
    write_pytorch(tmp_path / "old", model)
    status, output = convert(tmp_path / "old", tmp_path / "new")
    assert status == 0, output
    assert "M weights" in output
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "new", use_safetensors=True)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, converted.state_dict()[name])
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "new").iterdir()} == {0o644}, "a worker must read them"
    load_model(ModelSpec(path=str(tmp_path / "new")), "lm", [], torch.float32, 0)


def test_a_reward_model_stays_one_and_the_precision_can_be_chosen(tmp_path: Path) -> None:
    config = llama()
    config.num_labels = 1
    write_pytorch(tmp_path / "old", LlamaForSequenceClassification(config))
    convert_model(tmp_path / "old", tmp_path / "new", "bfloat16")
    weights = load_file(tmp_path / "new" / "model.safetensors")
    assert "score.weight" in weights
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_pytorch(tmp_path / "old", LlamaForCausalLM(llama()))
    torch.save({"weight": Payload()}, tmp_path / "old" / "pytorch_model.bin")
    status, output = convert(tmp_path / "old", tmp_path / "new")
    assert status == 2
    assert "cannot be converted" in output
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, ".", "has no weights"),
        ({"model.safetensors": b""}, ".", "needs no conversion"),
        ({"a.gguf": b"", "b.gguf": b""}, ".", "several .gguf files: a.gguf, b.gguf; name one"),
        ({"a.gguf": b"not a GGUF file"}, "a.gguf", "cannot be converted"),
        ({"weights.bin": b""}, "weights.bin", "is not a .gguf file"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path: Path, files: dict[str, bytes], source: str, message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    status, output = convert(folder / source, tmp_path / "new")
    assert (status, message in output) == (2, True), output
    assert list(tmp_path.iterdir()) == [folder], "nothing else is left"


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    write_pytorch(tmp_path / "old", LlamaForCausalLM(llama()))
    status, output = convert(tmp_path / "old", tmp_path)
    assert (status, "exists already" in output) == (2, True), output


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    model = LlamaForSequenceClassification(llama())
    write_pytorch(tmp_path / "old", model)
    weights = model.state_dict()
    del weights["score.weight"]
    torch.save(weights, tmp_path / "old" / "pytorch_model.bin")
    status, output = convert(tmp_path / "old", tmp_path / "new")
    assert (status, "lacks the weights score.weight" in output) == (2, True), output
    assert not (tmp_path / "new").exists()

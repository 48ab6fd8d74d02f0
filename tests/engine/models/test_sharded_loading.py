"""Weights that each rank reads in shards: equal to those of the whole model, for every supported architecture.

The ranks are torch's fake process group, which moves nothing: of eight ranks the shards are compared, of one the passes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.sections.models import Lora
from oppo_contract.spec import ModelSpec
from oppo_core.models.huggingface import HuggingFaceNetwork
from oppo_core.models.model_io import load_model
from oppo_core.models.tiny_transformer import Head
from oppo_core.training.sharded_module import ShardedModule
from tests.engine.models.architectures import ARCHITECTURES, VOCAB, WITHOUT_CLASSIFIER
from tests.engine.models.test_architectures import Folders
from tests.engine.models.test_architectures import folders as folders  # the fixture
from tests.fakes.fake_process_group import fake_ranks

WORLD, RANK = 8, 3
# A mixture of experts chooses rows by values, which a model without weights does not have: it is loaded whole and then sharded.
READ_WHOLE = {"mixtral", "gpt_oss"}
ROLES: list[tuple[str, Head]] = [("actor", "lm"), ("actor", "scalar"), ("reward", "scalar")]
CASES = [
    (name, part, head) for name in ARCHITECTURES for part, head in ROLES if part == "actor" or name not in WITHOUT_CLASSIFIER
]
TOKENS = torch.arange(3, 27)[None] % VOCAB, torch.arange(24)[None]


def load(folder: Path, part: str, head: Head, sharded: bool, dtype: torch.dtype = torch.float32) -> HuggingFaceNetwork:
    network = load_model(ModelSpec(path=part), head, [folder], dtype, 0, sharded=sharded)
    assert isinstance(network, HuggingFaceNetwork)
    return network


@pytest.mark.parametrize(("name", "part", "head"), CASES)
def test_a_rank_reads_its_shards(folders: Folders, name: str, part: str, head: Head) -> None:
    whole, network = load(folders(name), part, head, False), load(folders(name), part, head, True)
    assert (network.pending is None) == (name in READ_WHOLE)
    assert network.attends_by_band == whole.attends_by_band
    assert bool(network.refuses_packing) == bool(whole.refuses_packing)
    assert network.cache_shape == whole.cache_shape
    with fake_ranks(RANK, WORLD) as ranks:
        ShardedModule(network, ranks, trained=False)
        assert network.pending is None
        own = dict(network.named_parameters())
        assert list(own) == [key for key, _ in whole.named_parameters()]
        for key, weight in whole.named_parameters():
            rows = -(-len(weight) // WORLD)
            shard = own[key]
            assert isinstance(shard, DTensor)
            assert torch.equal(shard.to_local(), weight[RANK * rows : (RANK + 1) * rows]), key
        for key, buffer in whole.named_buffers():
            assert torch.equal(network.get_buffer(key), buffer), key


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("name", "part", "head"), CASES)
def test_passes_of_read_shards_equal_those_of_the_whole(
    folders: Folders, name: str, part: str, head: Head, trained: bool
) -> None:  # fmt: skip
    whole, network = load(folders(name), part, head, False), load(folders(name), part, head, True)

    def outputs(of: HuggingFaceNetwork) -> tuple[torch.Tensor]:
        states = of.hidden(*TOKENS)
        return (of.logits(states) if head == "lm" else of.scalar(states),)

    with fake_ranks(0, 1) as ranks:
        module = ShardedModule(network, ranks, trained)
        for _ in range(2):
            with torch.set_grad_enabled(trained):
                values = module.run(outputs)[0]
                expected = outputs(whole)[0]
            torch.testing.assert_close(values, expected, rtol=0, atol=0)
            if trained:
                values.square().sum().backward()
                expected.square().sum().backward()
                for (key, weight), (_, plain) in zip(network.named_parameters(), whole.named_parameters(), strict=True):
                    assert isinstance(weight.grad, DTensor)
                    assert plain.grad is not None
                    torch.testing.assert_close(weight.grad.full_tensor(), plain.grad, rtol=1e-5, atol=1e-6, msg=key)
                    weight.grad = plain.grad = None


def test_trained_shards_of_16_bits_become_float32(folders: Folders) -> None:
    network = load(folders("qwen2"), "actor", "lm", True, torch.bfloat16)
    whole = load(folders("qwen2"), "actor", "lm", False, torch.bfloat16)
    with fake_ranks(0, 1) as ranks:
        ShardedModule(network, ranks, trained=True)
        for (key, weight), (_, plain) in zip(network.named_parameters(), whole.named_parameters(), strict=True):
            assert weight.dtype == torch.float32
            assert isinstance(weight, DTensor)
            assert torch.equal(weight.to_local(), plain.float()), key


def test_with_adapters_a_model_is_loaded_whole(folders: Folders) -> None:
    network = load_model(ModelSpec(path="actor"), "lm", [folders("qwen2")], torch.float32, 0, Lora(rank=2), sharded=True)
    assert isinstance(network, HuggingFaceNetwork)
    assert network.pending is None


def test_missing_weights_are_named(folders: Folders, tmp_path: Path) -> None:
    shutil.copytree(folders("qwen2") / "actor", tmp_path / "actor")
    file = tmp_path / "actor" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    network = load(tmp_path, "actor", "lm", True)
    with fake_ranks(RANK, WORLD) as ranks, pytest.raises(ModelFolderError, match=r"lacks the weights model\.layers\.1\.mlp\.up"):
        ShardedModule(network, ranks, trained=False)

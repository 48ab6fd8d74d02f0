"""What a rank holds of a sharded network, counted by torch's own tracker: its shard, and at most two units' whole weights.

The eight ranks are a fake process group. That sharded passes give
what whole ones do is tested in `tests/backends`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from oppo_bench.engine.live_bytes import most_weights
from oppo_contract.spec import TinyArchitecture
from oppo_core.distributed.process_group import Ranks
from oppo_core.models.activation_checkpointing import transformer_blocks
from oppo_core.models.huggingface import HuggingFaceNetwork
from oppo_core.models.protocol import Network
from oppo_core.models.tiny_transformer import TinyTransformer
from oppo_core.training.sharded_module import ShardedModule
from tests.fakes.fake_process_group import fake_ranks

WORLD = 8
WIDTH, LAYERS, VOCAB = 64, 3, 800
TOKENS = torch.zeros(2, 16, dtype=torch.long), torch.arange(16).expand(2, 16)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with fake_ranks(0, WORLD) as ranks:
        yield ranks


def tiny() -> Network:
    return TinyTransformer(TinyArchitecture(hidden=WIDTH, layers=LAYERS, heads=4, context=64, vocab=VOCAB), "lm")


def qwen2(tied: bool | None) -> Network:
    """A language model whose head is tied or not; None: with a scalar head."""
    config = Qwen2Config(
        hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, tie_word_embeddings=bool(tied), attn_implementation="sdpa",
    )  # fmt: skip
    if tied is None:
        return HuggingFaceNetwork(Qwen2Model(config), nn.Linear(WIDTH, 1))
    return HuggingFaceNetwork(Qwen2ForCausalLM(config), None)


def run(module: ShardedModule, is_language_model: bool) -> torch.Tensor:
    def compute(network: Network) -> tuple[torch.Tensor]:
        states = network.hidden(*TOKENS)
        return ((network.logits(states) if is_language_model else network.scalar(states)).sum(),)

    return module.run(compute)[0]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ["tiny", "tied", "untied", "scalar"])
def test_a_rank_holds_its_shard_and_two_units(ranks: Ranks, kind: str, backward: bool) -> None:
    network = tiny() if kind == "tiny" else qwen2({"tied": True, "untied": False, "scalar": None}[kind])
    whole = sum(weight.numel() for weight in network.parameters())
    block = sum(weight.numel() for weight in transformer_blocks(network)[0].parameters())
    table = VOCAB * WIDTH
    rest = whole - LAYERS * block - (table if kind in ("untied", "scalar") else 0)  # with the head, or the tied table
    units = sorted([rest, *[block] * LAYERS, *([table] if kind in ("untied", "scalar") else [])])
    module = ShardedModule(network, ranks, trained=backward)
    shard = sum(weight.to_local().numel() for weight in network.parameters())
    assert shard <= 1.02 * whole / WORLD + WORLD
    with FSDPMemTracker(module._module) as tracker, torch.set_grad_enabled(backward):
        result = run(module, kind != "scalar")
        if backward:
            result.backward()
    assert 4 * (shard + units[-1]) < most_weights(tracker) <= 4 * (shard + sum(units[-2:]))

"""The estimate of a rank's memory equals what torch's memory trackers count, within 5 %, on small models of four shapes.

In float32 on a CPU. The eight ranks are a fake process group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from oppo_bench.engine.live_bytes import LiveBytes
from oppo_contract.spec import ModelSpec, RunSpec, TinyArchitecture, load_spec
from oppo_core.checkpointing.background import BackgroundWriter
from oppo_core.distributed.process_group import SINGLE, Ranks
from oppo_core.models.attention import FUSED
from oppo_core.models.cache import SlotCache
from oppo_core.models.huggingface import HuggingFaceNetwork
from oppo_core.models.load_roles import DTYPES
from oppo_core.models.protocol import Network
from oppo_core.models.tiny_transformer import TinyTransformer
from oppo_core.ppo.actor import ActorTrainer
from oppo_core.ppo.critic import CriticTrainer
from oppo_core.training.backends import backend_factory
from oppo_core.training.fsdp import FsdpBackend
from oppo_estimate.items import Role
from oppo_estimate.memory import decode_slots, memory_items
from oppo_estimate.shapes import Shape, read_shape, tiny_shape
from oppo_estimate.sharded_memory import checkpoint_copies
from tests.fakes.fake_process_group import fake_ranks

WORLD, ROWS, LENGTH = 8, 8, 75
RECOMPUTE = ("off", "head", "selective", "full")
TINY = TinyArchitecture(hidden=64, layers=6, heads=4, context=96, vocab=512)
# Hidden width, width of the feed-forward part, layers, heads, heads of keys, vocabulary, and whether the head is tied.
QWEN2 = {
    "tied": (64, 352, 6, 4, 4, 512, True),
    "grouped": (112, 608, 4, 14, 2, 640, False),  # the proportions of Qwen 2.5, with grouped heads and a head of its own
    "wide vocabulary": (48, 256, 4, 4, 2, 8192, False),
}
MODELS = ("tiny", *QWEN2)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with fake_ranks(0, WORLD) as ranks:
        yield ranks


def build(kind: str, folder: Path) -> tuple[Network, Shape]:
    """A network, and its shape as read from a folder that has config.json alone."""
    if kind == "tiny":
        return TinyTransformer(TINY, "lm"), tiny_shape(TINY, "lm")
    width, inner, layers, heads, key_heads, vocab, tied = QWEN2[kind]
    config = Qwen2Config(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=128,
    )  # fmt: skip
    config.save_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model.set_attn_implementation(FUSED)
    shape = read_shape(ModelSpec(path=str(folder)), "lm", [])
    assert shape is not None
    return HuggingFaceNetwork(model, None), shape


def spec_of(backend: str, recompute: str, dtype: str = "float32") -> RunSpec:
    """Each rank trains `ROWS` rows of `LENGTH` tokens in one pass."""
    processes = WORLD if backend == "fsdp2" else 1
    return load_spec({
        "name": "estimate", "steps": 1, "data": {"prompts": "prompts.jsonl"},
        "models": {"actor": {"tiny": {}}, "reward": {"rule": "letters:score"}},
        "rollout": {"max_prompt_tokens": 1, "max_new_tokens": LENGTH - 1},
        "ppo": {"batch_size": ROWS * processes, "micro_batch_tokens": ROWS * LENGTH},
        "training": {"backend": backend, "recompute": recompute}, "overlap": {"intra_step": "off", "inter_step": "off"},
        "resources": {"kind": "cpu", "processes": processes, "dtype": dtype},
    })  # fmt: skip


def trainer_of(network: Network, spec: RunSpec, ranks: Ranks) -> ActorTrainer:
    return ActorTrainer(network, spec.ppo, 1.0, 0, 1, ranks, backend_factory(spec.training), spec.training)


def backward_passes(trainer: ActorTrainer) -> None:
    """Of one mini-batch; `trainer.optimizer.begin(1)` is called before."""
    forward = trainer.forward([np.arange(LENGTH) + row for row in range(ROWS)], [1] * ROWS, 0)
    assert forward.passes == 1
    for _, (logp, _) in forward.groups():
        trainer.optimizer.backward(logp.sum() / (ROWS * LENGTH))


def estimated(spec: RunSpec, shape: Shape) -> dict[str, int]:
    return {item.name: item.size for item in memory_items(spec, [Role("actor", shape, shape.weights)], decode_slots(spec))}


def bytes_by_kind(tracker: FSDPMemTracker, moment: str) -> dict[str, int]:
    (sizes,) = [sizes for device, sizes in tracker.get_tracker_snapshot(moment).items() if device.type == "cpu"]
    return {getattr(kind, "value", kind): size for kind, size in sizes.items()}


def within(counted: float, estimate: float) -> Any:
    return estimate == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", MODELS)
def test_sharded_training(kind: str, recompute: str, ranks: Ranks, tmp_path: Path) -> None:
    """Shards of weights, gradients and moments, and the largest transient."""
    network, shape = build(kind, tmp_path)
    spec = spec_of("fsdp2", recompute)
    sizes = estimated(spec, shape)
    trainer = trainer_of(network, spec, ranks)
    backend = trainer.optimizer
    assert isinstance(backend, FsdpBackend)
    backend.begin(1)
    with FSDPMemTracker(backend.sharded._module, backend._adamw) as tracker:
        backward_passes(trainer)
        largest = bytes_by_kind(tracker, "peak")
        backend.apply(0, "actor")
        after = bytes_by_kind(tracker, "current")
    assert within(after["Sharded Param"], sizes["actor: sharded weights"])
    assert within(after["Sharded Grad"], sizes["actor: gradients"])
    assert within(after["OptState"], sizes["actor: optimizer"])
    transient = largest["Total"] - largest["Sharded Param"] - largest["Sharded Grad"]
    assert within(transient, sizes["actor: activations"]), transient / sizes["actor: activations"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_copies_of_the_critic_for_a_checkpoint(dtype: str, ranks: Ranks, tmp_path: Path) -> None:
    """Its weights have the run's precision, although float32 is trained."""
    spec, network = spec_of("fsdp2", "off", dtype), TinyTransformer(TINY, "scalar").to(DTYPES[dtype])
    shape = tiny_shape(TINY, "scalar")
    trainer = CriticTrainer(network, spec.ppo, 0, 1, ranks, backend_factory(spec.training), spec.training)
    trainer.optimizer.begin(1)
    (values,) = next(iter(trainer.forward([np.arange(LENGTH)], [1], 0).groups()))[1]
    trainer.optimizer.backward(values.sum() / LENGTH)
    trainer.optimizer.apply(0, "critic")
    trainer.writer = BackgroundWriter()
    trainer.save(str(tmp_path))
    weights, state = (write.args[0] for write in trainer.writer._parts)  # type: ignore[attr-defined]
    assert {copy.dtype for copy in weights.values()} == {DTYPES[dtype]}
    assert {copy.dtype for copy in state.values()} == {torch.float32}
    copies = [copy.to_local() for copy in (*weights.values(), *state.values()) if isinstance(copy, DTensor)]
    assert within(sum(copy.nbytes for copy in copies), checkpoint_copies(spec, Role("critic", shape, shape.weights)).size)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", MODELS)
def test_activations_of_whole_models(kind: str, recompute: str, tmp_path: Path) -> None:
    network, shape = build(kind, tmp_path)
    spec = spec_of("plain", recompute)
    trainer = trainer_of(network, spec, SINGLE)
    trainer.optimizer.begin(1)
    for weight in network.parameters():
        weight.grad = torch.zeros_like(weight)  # the gradients are another item of the estimate
    with LiveBytes() as counted:
        backward_passes(trainer)
    sizes = estimated(spec, shape)
    assert within(counted.peak, sizes["actor: activations"]), counted.peak / sizes["actor: activations"]


@pytest.mark.parametrize("kind", MODELS)
def test_weights_and_cache(kind: str, tmp_path: Path) -> None:
    network, shape = build(kind, tmp_path)
    assert shape.weights == sum(weight.numel() for weight in network.parameters())
    sizes = estimated(spec_of("plain", "off"), shape)
    cache = SlotCache(network.cache_shape, ROWS, LENGTH, torch.zeros(1))
    assert sizes["actor: keys and values"] == sum(store.nbytes for store in (*cache.keys, *cache.values))
    assert sizes["actor: weights"] == sum(weight.nbytes for weight in network.parameters())


def test_an_unknown_inner_width_follows_from_the_weights(tmp_path: Path) -> None:
    """As on the platform, whose catalogue has no width of the feed-forward part."""
    for kind in QWEN2:
        _, shape = build(kind, tmp_path)
        assert replace(shape, inner_width=0).feed_forward == pytest.approx(shape.inner_width, rel=0.01)

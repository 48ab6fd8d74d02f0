"""What an update keeps for its backward pass: fewer bytes, the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from oppo_bench.engine.live_bytes import LiveBytes
from oppo_contract.model_folder import ModelFolderError
from oppo_contract.sections.models import Lora
from oppo_contract.spec import ModelSpec, Ppo, TinyArchitecture, Training
from oppo_core.models import activation_checkpointing
from oppo_core.models.attention import FUSED
from oppo_core.models.huggingface import HuggingFaceNetwork
from oppo_core.models.model_io import load_model
from oppo_core.ppo.actor import ActorTrainer
from oppo_core.ppo.critic import CriticTrainer
from oppo_estimate import memory as memory_estimate
from oppo_estimate.items import Role
from oppo_estimate.memory import memory_items
from oppo_estimate.shapes import Shape
from tests.engine.conftest import world as world  # the fixture
from tests.engine.models.architectures import write_folders

ROWS, LENGTHS, PROMPTS = 6, (9, 23, 14, 5, 30, 11), (3, 5, 2, 4, 7, 1)
# Entropy in the loss, so that its gradient goes through the head as well.
PPO = Ppo(batch_size=ROWS, micro_batch_tokens=40, entropy_coefficient=0.1)
SETTINGS: dict[str, dict[str, str]] = {
    "head": {"recompute": "head"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "packed": {"packing": "on"},
    "packed-full": {"packing": "on", "recompute": "full"},
    "packed-selective": {"packing": "on", "recompute": "selective"},
}
# One of each kind of attention: ours, grouped, with a window and capped logits, learned positions, experts.
QUICK, SLOW = ("tiny", "qwen2"), ("gemma2", "gpt2", "mistral", "gemma3", "cohere2", "mixtral", "phi3")


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_checkpointing, "HEAD_SLICE", 7)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    written: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in written:
            written[name] = write_folders(name, tmp_path_factory.mktemp(name))
        return written[name]

    return find


def network_of(name: str, folders: Any, lora: Lora | None = None, head: Any = "lm") -> Any:
    if name == "tiny":
        tiny = TinyArchitecture(hidden=24, layers=3, heads=4, context=64, vocab=50)
        return load_model(ModelSpec(tiny=tiny), head, [], torch.float64, 3, lora)
    return load_model(ModelSpec(path="actor"), head, [folders(name)], torch.float64, 3, lora)


def rows() -> list[Any]:
    generator = np.random.default_rng(5)
    return [generator.integers(3, 50, length) for length in LENGTHS]


def actor_gradients(network: Any, training: Training, kept: int | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs a row, and the gradient of a loss that weighs every token otherwise."""
    trainer = ActorTrainer(network, PPO, 0.8, 0, 1, training=training)
    held = trainer.forward(rows(), list(PROMPTS), kept)
    logprobs = held.first
    trainer.optimizer.begin(held.passes)
    for group, (logp, entropy) in held.groups():
        weights = torch.cat([torch.arange(LENGTHS[r] - PROMPTS[r]) + r + 1.0 for r in group])
        trainer.optimizer.backward((weights.to(logp) * (logp + 0.1 * entropy)).sum() / 100)
    return logprobs, [p.grad.clone() for p in trainer.optimizer.masters]


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor], allowed: float) -> None:
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=allowed * max(1.0, float(two.abs().max())))


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["all", "adapters"])
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)])
def test_gradients_are_those_of_padded_passes_that_keep_everything(name: str, lora: Lora | None, folders: Any) -> None:
    gradients_agree(name, lora, folders)


def gradients_agree(name: str, lora: Lora | None, folders: Any) -> None:
    """Under every setting log-probs and gradients of the actor agree with those of padded passes that keep everything."""
    network = network_of(name, folders, lora)
    if lora is not None:
        with torch.no_grad():
            for weight in network.parameters():
                weight += 0.05 * torch.arange(weight.numel()).view_as(weight).sin() if weight.requires_grad else 0.0
    logprobs, plain = actor_gradients(network, Training())
    assert any(float(gradient.abs().max()) > 0.1 for gradient in plain)
    found = {}
    # Beyond QUICK some norms compute in float32, whatever the weights are.
    allowed = 1e-12 if name in QUICK else 1e-5
    for setting, given_ in SETTINGS.items():
        for kept in (None, 0):
            ours, gradients = actor_gradients(network, Training.model_validate(given_), kept)
            assert_close(ours, logprobs, allowed)
            assert_close(gradients, plain, allowed)
        found[setting] = gradients
    # What is computed again is computed alike: to the bit.
    for setting in ("selective", "full"):
        assert all(torch.equal(one, two) for one, two in zip(found[setting], found["head"], strict=True)), setting
    _, again = actor_gradients(network, Training())
    assert all(torch.equal(one, two) for one, two in zip(again, plain, strict=True)), "the network was not put back"


@pytest.mark.parametrize("name", QUICK)
def test_short_weights_have_the_same_gradients_but_for_their_rounding(name: str, folders: Any) -> None:
    network = network_of(name, folders).to(torch.bfloat16)
    _, plain = actor_gradients(network, Training())
    found = {setting: actor_gradients(network, Training.model_validate(given_))[1] for setting, given_ in SETTINGS.items()}
    length = torch.cat([gradient.flatten() for gradient in plain]).norm()
    for setting, gradients in found.items():
        apart = torch.cat([(one - two).flatten() for one, two in zip(gradients, plain, strict=True)]).norm()
        assert apart < 0.02 * length, setting
    for setting in ("selective", "full"):
        assert all(torch.equal(one, two) for one, two in zip(found[setting], found["head"], strict=True)), setting


def critic_gradients(critic: Any, training: Training) -> list[torch.Tensor]:
    trainer = CriticTrainer(critic, PPO, 0, 1, training=training)
    trainer.optimizer.begin(1)
    for group, (values,) in trainer.forward(rows(), list(PROMPTS), 0).groups():
        weights = torch.cat([torch.arange(LENGTHS[r] - PROMPTS[r]) + r + 1.0 for r in group])
        trainer.optimizer.backward((weights.to(values) * values).sum())
    return [p.grad.clone() for p in trainer.optimizer.parameters if p.grad is not None]


def test_the_critics_gradients_too(folders: Any) -> None:
    critic = network_of("qwen2", folders, head="scalar")
    with torch.no_grad():
        critic.own_head.weight.copy_(torch.arange(24.0)[None].sin())
    plain = critic_gradients(critic, Training())
    assert len(plain) == len(list(critic.parameters()))
    for given_ in SETTINGS.values():
        assert_close(critic_gradients(critic, Training.model_validate(given_)), plain, 1e-12)


def peak_of(network: Any, name: str) -> int:
    """Most bytes that the passes over 8 rows of 75 tokens hold, besides gradients of the weights, which are there before."""
    trainer = ActorTrainer(network, Ppo(batch_size=8, micro_batch_tokens=600), 1.0, 0, 1, training=memory(name))
    for weight in network.parameters():
        weight.grad = torch.zeros_like(weight)
    with LiveBytes() as counted:
        for _, (logp, _) in trainer.forward([np.arange(75) + row for row in range(8)], [5] * 8).groups():
            logp.sum().backward()
    return counted.peak


def memory(name: str) -> Training:
    return Training.model_validate({"recompute": name})


def test_each_setting_keeps_less_and_the_memory_plan_knows_how_much(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the proportions of Qwen 2.5, with logits as large as its blocks' activations."""
    sizes = {"hidden_size": 56, "intermediate_size": 304, "num_attention_heads": 7, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=3200, num_hidden_layers=8, max_position_embeddings=96, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model.set_attn_implementation(FUSED)
    network = HuggingFaceNetwork(model, None)
    monkeypatch.setattr(activation_checkpointing, "HEAD_SLICE", 75)
    monkeypatch.setattr(memory_estimate, "HEAD_SLICE", 75)
    shape = Shape(0, 8, 56, 3200, 96, 2 * 8 * 8, inner_width=304)
    peaks, ratios = [], []
    for name in ("off", "head", "selective", "full"):
        rows_of_75 = {"max_new_tokens": 70, "max_prompt_tokens": 5}
        ppo = {"batch_size": 8, "micro_batch_tokens": 600}
        spec = world.spec({"rollout": rows_of_75, "ppo": ppo, "training": {"recompute": name}, "resources": {"dtype": "float32"}})
        (item,) = [item for item in memory_items(spec, [Role("actor", shape, 1)], 9) if item.name == "actor: activations"]
        peaks.append(peak_of(network, name))
        ratios.append(item.size / peaks[-1])
    off, head, selective, full = peaks
    assert head < 0.7 * off
    assert selective < 0.75 * head
    assert full < 0.5 * selective
    assert ratios == pytest.approx([1, 1, 1, 1], rel=0.06), ratios


@pytest.mark.parametrize("name", [pytest.param("stablelm", marks=pytest.mark.full), "gpt_oss"])
def test_unsupported_packing_is_refused_with_the_reason(name: str, folders: Any) -> None:
    network = network_of(name, folders)
    with pytest.raises(ModelFolderError, match=r"training\.packing is on, but a model cannot be packed: .+; set it to off"):
        ActorTrainer(network, PPO, 0.8, 0, 1, training=Training(packing="on"))
    ActorTrainer(network, PPO, 0.8, 0, 1)


def test_a_network_whose_blocks_cannot_be_found_is_refused(folders: Any) -> None:
    network = network_of("qwen2", folders)
    network.model.model.layers = torch.nn.ModuleDict({str(n): layer for n, layer in enumerate(network.model.model.layers)})
    with pytest.raises(ModelFolderError, match=r"blocks .* cannot be told apart.* set training\.recompute to head or off"):
        ActorTrainer(network, PPO, 0.8, 0, 1, training=Training(recompute="full"))


PLAIN: dict[str, Any] = {"overlap": {"intra_step": "off", "inter_step": "off"}, "steps": 3}
TEXTS = {"pretraining": {"data": "texts.jsonl", "coefficient": 0.7, "sequences": 4}}
RUNS: dict[str, dict[str, Any]] = {
    "one pass": {},
    "epochs and texts": {"ppo": {"epochs": 2, "mini_batches": 2, "micro_batch_tokens": 200} | TEXTS},
    "both processes train": {"overlap": {"intra_step": "per_chunk", "inter_step": "defer", "update_overlap": True}},
}


@pytest.mark.parametrize(
    "changes", [pytest.param(c, id=n, marks=[pytest.mark.full] * (n != "epochs and texts")) for n, c in RUNS.items()]
)
def test_a_run_ends_with_the_same_weights(world: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    inline = "overlap" in changes
    plain = world.run(world.spec(PLAIN, changes), tmp_path / "plain", inline=inline)
    memory = {"training": {"recompute": "full", "packing": "on"}}
    less = world.run(world.spec(PLAIN, changes, memory), tmp_path / "less", inline=inline)
    for role in ("actor", "critic"):
        for name, weight in plain.weights(role).items():
            torch.testing.assert_close(weight, less.weights(role)[name], rtol=0, atol=1e-9)
    assert [step.tokens for step in plain.steps] == [step.tokens for step in less.steps]

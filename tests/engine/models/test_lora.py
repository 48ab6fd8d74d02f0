"""Low-rank adapters: they begin as nothing, train alone, are saved as adapters or merged, and come back bit by bit."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from oppo_contract.model_folder import ModelFolderError, read_config
from oppo_contract.sections.models import Lora
from oppo_contract.spec import ModelSpec, TinyArchitecture
from oppo_core.checkpointing.export import export_actor
from oppo_core.engine.layout import LayoutError
from oppo_core.engine.preflight import preflight
from oppo_core.models import adapters, shared_weights
from oppo_core.models.adapters import (
    ADAPTER_WEIGHTS,
    has_lora,
    inject_lora,
    linear_layers,
    load_trained_weights,
    merged_weights,
    saved_module,
    trained_weights,
)
from oppo_core.models.model_io import load_model, load_with_base, restore_weights, save_actor, save_merged
from oppo_core.models.shared_weights import move_to_shared_memory, use_shared_weights
from oppo_core.models.tiny_transformer import TinyTransformer, init_tiny
from tests.engine.engine.test_preflight import cli
from tests.engine.models.architectures import write_folders

LORA = Lora(rank=4, alpha=8.0)
KINDS = ["tiny", "qwen2", "gpt2", "gemma2", "mixtral"]


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A root and the name of the language model's folder below it."""
    if request.param == "tiny":
        return request.getfixturevalue("world").folder, "actor"
    return write_folders(request.param, tmp_path_factory.mktemp(request.param)), "actor"


def load(place: tuple[Path, str], lora: Lora | None, head: Any = "lm", seed: int = 7) -> Any:
    return load_model(ModelSpec(path=place[1]), head, [place[0]], torch.float64, seed, lora)


def tokens_of(rows: int = 3, length: int = 14) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(4))
    return tokens, torch.arange(length).expand_as(tokens)


def logits_of(network: Any) -> torch.Tensor:
    return network.logits(network.hidden(*tokens_of()))


def train(network: Any, steps: int = 3) -> None:
    """A few steps that make the first token likelier everywhere."""
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        (-torch.log_softmax(logits_of(network), -1)[..., 3].mean()).backward()
        optimizer.step()


def test_adapters_begin_as_nothing_and_train_alone(place: tuple[Path, str]) -> None:
    plain, adapted = load(place, None), load(place, LORA)
    assert torch.equal(logits_of(plain), logits_of(adapted))
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    train(adapted)
    moved = {name for name, weight in adapted.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert len(moved) >= 2 * len(linear_layers(load(place, None)))
    assert (logits_of(adapted) - logits_of(plain)).abs().max() > 1e-3


def test_adapted_layers_compute_what_peft_s_do(place: tuple[Path, str]) -> None:
    adapted = load(place, LORA)
    train(adapted)
    layers = [layer for layer in adapted.modules() if hasattr(layer, "lora_A")]
    assert layers
    for layer in layers:
        x = torch.randn(3, 5, layer.in_features, dtype=layer.lora_A["default"].weight.dtype, requires_grad=True)
        weights = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        ours, theirs = layer(x), type(layer).__base__.forward(layer, x)
        torch.testing.assert_close(ours, theirs)
        for mine, other in zip(torch.autograd.grad(ours.sum(), weights), torch.autograd.grad(theirs.sum(), weights), strict=True):
            torch.testing.assert_close(mine, other)


def test_the_start_depends_on_the_seed_alone(place: tuple[Path, str]) -> None:
    network = load(place, None)
    state = torch.random.get_rng_state()
    inject_lora(network, LORA, 7)
    first = trained_weights(network)
    assert torch.equal(torch.random.get_rng_state(), state), "somebody else's random numbers were used up"
    second, third = trained_weights(load(place, LORA)), trained_weights(load(place, LORA, seed=8))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], third[name]) for name in first)


def test_saved_adapters_are_peft_s_and_restoring_is_exact(place: tuple[Path, str], tmp_path: Path) -> None:
    """peft reads them beside the frozen weights, and so does this engine in another process."""
    adapted = load(place, LORA)
    train(adapted)
    live = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    save_actor(adapted, tmp_path / "out", place[0] / place[1], 2, 0)
    assert all(torch.equal(live[name], weight) for name, weight in adapted.state_dict().items()), "saving changed the network"
    assert (tmp_path / "out" / "tokenizer.json").exists() == (place[0] / place[1] / "tokenizer.json").exists()
    again = load(place, LORA, seed=99)
    restore_weights(again, tmp_path / "out")
    assert torch.equal(logits_of(again), logits_of(adapted))
    with pytest.raises(ModelFolderError, match=r"has LoRA adapters alone; .* oppo export --merge"):
        read_config(tmp_path / "out")
    base = load(place, None)
    if not isinstance(base, TinyTransformer):
        tokens, _ = tokens_of()
        model = PeftModel.from_pretrained(base.model, tmp_path / "out").eval()
        torch.testing.assert_close(model(tokens).logits, logits_of(adapted), rtol=0, atol=1e-10)


def test_merged_adapters_are_a_plain_model(place: tuple[Path, str], tmp_path: Path) -> None:
    adapted = load(place, LORA)
    train(adapted)
    save_merged(adapted, tmp_path / "out", place[0] / place[1], 2, 0)
    torch.testing.assert_close(logits_of(load((tmp_path, "out"), None)), logits_of(adapted), rtol=0, atol=1e-10)


def test_young_adapters_survive_merging_of_a_bfloat16_model(place: tuple[Path, str], tmp_path: Path) -> None:
    """One optimizer step at 1e-5 changes weights by less than half a unit in their last place."""
    adapted = load_model(ModelSpec(path=place[1]), "lm", [place[0]], torch.bfloat16, 7, LORA)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-5)
    (-torch.log_softmax(logits_of(adapted), -1)[..., 3].mean()).backward()
    optimizer.step()
    base = load_model(ModelSpec(path=place[1]), "lm", [place[0]], torch.bfloat16, 7).state_dict()
    exact = {name: weight.double() for name, weight in merged_weights(deepcopy(adapted).double()).items()}
    rounded = merged_weights(adapted)
    save_merged(adapted, tmp_path / "out", place[0] / place[1], 2, 0)
    saved = load_model(ModelSpec(path="out"), "lm", [tmp_path], torch.float32, 7)
    merged = saved_module(saved).state_dict()
    moved = [name for name in exact if not torch.equal(exact[name], prefixed(base, name).double())]
    assert moved
    assert error(rounded, exact, base, moved) > 0.5
    assert error(merged, exact, base, moved) < 0.02


def prefixed(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A weight of a network by its name in the folder."""
    return weights[name] if name in weights else weights[f"model.{name}"]


def error(
    merged: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], base: dict[str, torch.Tensor], moved: list[str]
) -> float:
    """How far the adapters' contribution is off, relative to it."""
    off = sum(float((merged[name].double() - exact[name]).square().sum()) for name in moved)
    whole = sum(float((exact[name] - prefixed(base, name).double()).square().sum()) for name in moved)
    return (off / whole) ** 0.5


def test_a_critic_trains_its_head_too(place: tuple[Path, str]) -> None:
    critic = load(place, LORA, head="scalar")
    trained = {name for name, weight in critic.named_parameters() if weight.requires_grad}
    assert {name for name in trained if ".lora_" not in name} in (
        {"own_head.weight", "own_head.bias"},
        {"head.weight", "head.bias"},
    )
    other = load(place, LORA, head="scalar", seed=8)
    load_trained_weights(other, {name: weight.clone() for name, weight in trained_weights(critic).items()})
    with torch.no_grad():
        assert torch.equal(other.hidden(*tokens_of()), critic.hidden(*tokens_of()))


def test_adapters_beside_other_weights_are_refused(place: tuple[Path, str]) -> None:
    adapted, other = load(place, LORA), load(place, None)
    with torch.no_grad():
        next(iter(other.parameters())).mul_(1.001)
    inject_lora(other, LORA, 7)
    with pytest.raises(ModelFolderError, match="frozen weights have changed"):
        load_trained_weights(other, trained_weights(adapted))


def test_targets(place: tuple[Path, str]) -> None:
    name = linear_layers(load(place, None))[0].rpartition(".")[2]
    chosen = load(place, Lora(rank=2, targets=[name]))
    assert {n.split(".lora_")[0].rpartition(".")[2] for n in trained_weights(chosen) if ".lora_" in n} == {name}
    with pytest.raises(ModelFolderError, match=rf"names nonsense, but .* linear layers .*{name}"):
        load(place, Lora(targets=[name, "nonsense"]))


def test_the_reference_is_the_actor_without_its_adapters(place: tuple[Path, str]) -> None:
    """The very same tensors, the same logits to the bit as of a model that was loaded for it, whatever the actor learns."""
    adapted, base = load_with_base(ModelSpec(path=place[1]), [place[0]], torch.float64, 7, LORA)
    loaded = load(place, None)
    assert torch.equal(logits_of(base), logits_of(loaded))
    train(adapted)
    assert (logits_of(adapted) - logits_of(base)).abs().max() > 1e-3
    assert torch.equal(logits_of(base), logits_of(loaded))
    assert not has_lora(base)
    assert has_lora(adapted)
    frozen = {weight.data_ptr() for weight in adapted.parameters() if not weight.requires_grad}
    assert {weight.data_ptr() for weight in base.parameters()} == frozen
    assert base.state_dict().keys() == loaded.state_dict().keys()
    assert torch.equal(logits_of(adapted), logits_of(restored(place, adapted)))


def restored(place: tuple[Path, str], adapted: Any) -> Any:
    """A new network with what `adapted` has learned."""
    other = load(place, LORA)
    load_trained_weights(other, {name: weight.clone() for name, weight in trained_weights(adapted).items()})
    return other


def test_another_process_may_have_it_too(world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    place = world.folder, "actor"
    _, base = load_with_base(ModelSpec(path="actor"), [world.folder], torch.float64, 7, LORA)
    wanted = logits_of(base)
    weights = move_to_shared_memory(base)
    assert weights is not None
    other = load(place, None, seed=8)
    use_shared_weights(other, weights)
    assert all(weight.is_shared() for weight in other.parameters())
    assert {w.data_ptr() for w in other.parameters()} == {w.data_ptr() for w in base.parameters()}
    assert torch.equal(logits_of(other), wanted)
    monkeypatch.setattr(shared_weights, "SHARED_MEMORY", world.folder)
    monkeypatch.setattr(shared_weights.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    assert move_to_shared_memory(load(place, None)) is None
    assert "the reference is loaded a second time" in caplog.text
    room = sum(weight.nbytes for weight in base.state_dict().values())  # type: ignore[attr-defined]
    monkeypatch.setattr(shared_weights.shutil, "disk_usage", lambda folder: SimpleNamespace(free=room))
    assert move_to_shared_memory(load(place, None)) is not None
    assert move_to_shared_memory(load(place, None), ranks_here=2) is None, "the other rank looks at the same moment"


def test_update_overlap_without_enough_shared_memory_is_refused(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_weights, "SHARED_MEMORY", world.folder)
    monkeypatch.setattr(shared_weights.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    with pytest.raises(LayoutError, match=r"overlap\.update_overlap needs .* of shared memory, .* has .*--shm-size"):
        world.assemble(world.spec({"overlap": {"update_overlap": True}}), tmp_path, 2)


TRAINED = {"models": {"lora": {"rank": 4, "alpha": 8.0}}, "steps": 4, "checkpoints": {"every_steps": 2, "keep": 9}}


@pytest.mark.parametrize("critic", [True, False])
def test_a_run_resumes_bit_by_bit(world: Any, tmp_path: Path, critic: bool) -> None:
    """With deferred sequences in flight, and the frozen weights as they were."""
    spec = world.spec(TRAINED, {"models": {"lora": {"critic": critic}}})
    whole = world.run(spec, tmp_path / "whole", inline=True)
    half = tmp_path / "whole" / "checkpoints" / "step-00000002"
    resumed = world.run(spec, tmp_path / "resumed", resume=half, inline=True)
    for role in ("actor", "critic"):
        one, two = whole.weights(role), resumed.weights(role)
        assert set(one) == set(two)
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert whole.steps[-1].tokens == resumed.steps[-1].tokens
    assert any(".lora_" in name for name in whole.weights("critic")) == critic
    assert all(name.startswith("base_model.model.blocks.") and ".lora_" in name for name in whole.weights("actor"))


def test_a_hugging_face_run_exports_what_it_trained(tmp_path: Path, world: Any) -> None:
    root = write_folders("gpt2", tmp_path)
    for part in ("actor", "reward"):
        (root / part / "tokenizer.json").write_bytes((world.folder / "actor" / "tokenizer.json").read_bytes())
    rows = np.random.default_rng(1).integers(3, 40, (6, 4)).tolist()
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    changes = {"rollout": {"max_new_tokens": 30, "max_prompt_tokens": 8}, "overlap": {"intra_step": "off", "inter_step": "off"}}
    tree = world.tree(TRAINED, changes, {"steps": 2})
    out = tmp_path / "out"
    status, events = type(world)(root).main(tree, out)
    assert status == 0, events[-1]
    checkpoint = out / "checkpoints" / "step-00000002"
    start = AutoModelForCausalLM.from_pretrained(root / "actor")
    assert export_actor(checkpoint, tmp_path / "adapters") == [
        "README.md", "adapter_config.json", ADAPTER_WEIGHTS, "generation_config.json", "tokenizer.json",
    ]  # fmt: skip
    told = cli("export", checkpoint, tmp_path / "merged", "--merge")
    assert told.returncode != 0
    assert "actor does not exist here" in told.stderr
    told = cli("export", checkpoint, tmp_path / "merged", "--merge", "--root", root)
    assert told.returncode == 0, told.stderr
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    cards = [(tmp_path / kind / "README.md").read_text() for kind in ("adapters", "merged")]
    assert ["PeftModel" in card for card in cards] == [True, False]
    assert ['library_name: "transformers"' in card for card in cards] == [False, True]
    weights, trained = start.state_dict(), merged.state_dict()
    moved = {name for name in weights if not torch.equal(weights[name], trained[name].to(weights[name].dtype))}
    assert moved
    assert all(name.startswith("transformer.h.") and name.endswith("weight") for name in moved)
    tokens, _ = tokens_of()
    with_adapters = PeftModel.from_pretrained(start, tmp_path / "adapters").eval()
    with torch.no_grad():
        torch.testing.assert_close(with_adapters(tokens).logits, merged.float()(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        pytest.param({"overlap": {"intra_step": "off"}}, 1, id="one-process"),
        pytest.param({}, 2, id="two-processes", marks=pytest.mark.full),
        pytest.param({"overlap": {"update_overlap": True}}, 2, id="both-train", marks=pytest.mark.full),
    ],
)
def test_a_run_without_a_second_copy_trains_the_same(world: Any, tmp_path: Path, changes: dict[str, Any], threads: int) -> None:
    """To the bit as with a reference that is loaded from the actor's folder."""
    spec = world.spec(TRAINED, changes, {"steps": 2})
    apart = world.spec(TRAINED, changes, {"steps": 2, "models": {"reference": {"path": "actor"}}})
    one, two = world.run(spec, tmp_path / "one", threads), world.run(apart, tmp_path / "two", threads)
    for role in ("actor", "critic"):
        assert all(torch.equal(weight, two.weights(role)[name]) for name, weight in one.weights(role).items())
    for step, other in zip(one.steps, two.steps, strict=True):
        assert torch.equal(step.experience.reference_logp, other.experience.reference_logp)
    assert float(one.steps[-1].experience.kl.abs().max()) > 0
    frozen = {w.data_ptr(): w for w in one.engine.actor.network.parameters() if not w.requires_grad}
    if threads == 1:
        reference = one.engine.scorers.reference.network
        assert {w.data_ptr() for w in reference.parameters()} == set(frozen)
    else:
        assert all(weight.is_shared() for weight in frozen.values())
    counted, both = ({item.name for item in preflight(s, [world.folder]).memory[0].items} for s in (spec, apart))
    assert both - counted == {"reference: weights"}


def wide_network(seed: int = 1) -> TinyTransformer:
    """In float32 and so wide that torch sums a weight in parts, one for each thread."""
    network = init_tiny(TinyArchitecture(hidden=512, layers=1, heads=4, context=32, vocab=40), "lm", seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(weight))))
    inject_lora(network, LORA, 3)
    return network


def test_adapters_are_restored_with_any_number_of_threads(tmp_path: Path) -> None:
    """Also those of earlier versions, whose digest depends on the number of threads."""
    torch.set_num_threads(1)
    save_actor(wide_network(), tmp_path, None, 2, 0)
    old = tmp_path / "old"
    shutil.copytree(tmp_path, old)
    torch.set_num_threads(3)
    tensors, network = load_file(tmp_path / ADAPTER_WEIGHTS), wide_network()
    digest = bytes(adapters._old_digest(network).tolist()).hex()
    save_file(tensors, old / ADAPTER_WEIGHTS, metadata={"format": "pt", adapters.OLD_DIGEST: digest})
    for threads in (1, 2):
        torch.set_num_threads(threads)
        network = wide_network()
        restore_weights(network, tmp_path)
        restore_weights(network, old)
    with torch.no_grad():
        next(weight for weight in network.parameters() if not weight.requires_grad)[0, 0] += 1e-6
    network.register_buffer(adapters.DIGEST, adapters._frozen_digest(network), persistent=False)
    for folder in (tmp_path, old):
        with pytest.raises(ModelFolderError, match="frozen weights have changed"):
            restore_weights(network, folder)

"""Copies of weights for decoding: the same numbers as the weights themselves, always the present ones, and gone afterwards."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from oppo_contract.sections.models import Lora
from oppo_contract.spec import ModelSpec, TinyArchitecture
from oppo_core.models import decode_weights
from oppo_core.models.decode_weights import DecodeWeights
from oppo_core.models.model_io import load_model, save_tiny
from oppo_core.models.tiny_transformer import init_tiny
from oppo_core.rollout.decoder import Decoder, DecodeSettings
from oppo_core.rollout.held_out import Evaluator
from oppo_core.rollout.sequence import Sequence
from oppo_core.update import overlapped
from tests.engine.models.architectures import write_folders

SETTINGS = DecodeSettings(seed=3, eos=2, temperature=0.9, max_prompt=8, max_new=12, micro_batch_tokens=400)
LORA = Lora(rank=4, alpha=8.0)
METHODS = ("forward", "logits")
TINY = TinyArchitecture(hidden=16, layers=2, heads=2, context=32, vocab=50)
PASS = torch.arange(3, 12)[None], torch.arange(9)[None]  # tokens and positions of one row


@pytest.fixture(autouse=True)
def small_networks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_weights, "LEAST_DECODE_COPY", 0)


@pytest.fixture(scope="module", params=["qwen2", "llama", "gpt2", "mixtral", "oppo_tiny"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param != "oppo_tiny":
        return write_folders(request.param, folder)
    save_tiny(init_tiny(TINY, "lm", 0), folder / "actor")
    return folder


def load(root: Path, lora: Lora | None = LORA, dtype: torch.dtype = torch.float32) -> Any:
    network = load_model(ModelSpec(path="actor"), "lm", [root], dtype, 7, lora)
    change(network, 1)
    return network


@torch.no_grad()
def change(network: Any, seed: int) -> None:
    """As an optimizer step does, in place."""
    generator = torch.Generator().manual_seed(seed)
    for weight in network.parameters():
        if weight.requires_grad:
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)


def sequences() -> list[Sequence]:
    return [Sequence(number, number, np.arange(3, 6 + number)) for number in range(3)]


def decoded(decoder: Decoder) -> tuple[list[list[int]], list[float]]:
    answers = sequences()
    decoder.begin(answers)
    while decoder.live:
        decoder.round(version=0)
    return [s.response for s in answers], [logp for s in answers for logp in s.behaviour_logprobs]


def own_methods(network: Any) -> dict[str, Any]:
    """Methods that modules have of their own, besides those of their class."""
    found = ((f"{name}.{method}", module.__dict__.get(method)) for name, module in network.named_modules() for method in METHODS)
    return {name: method for name, method in found if method is not None}


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapters", "all weights"])
def test_decoding_gives_the_same_tokens_and_log_probs(root: Path, lora: Lora | None, monkeypatch: pytest.MonkeyPatch) -> None:
    network = load(root, lora)
    decoder = Decoder(network, SETTINGS, 3)
    before = own_methods(network)
    for step in range(2):  # the second time with weights that have changed
        tokens, logprobs = decoded(decoder)
        assert own_methods(network) != before
        decoder.pause()
        assert own_methods(network) == before
        with monkeypatch.context() as without:
            without.setattr(decode_weights, "LEAST_DECODE_COPY", 10**12)
            expected_tokens, expected = decoded(Decoder(network, SETTINGS, 3))
        assert tokens == expected_tokens
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=2e-5)
        change(network, step + 2)


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapters", "all weights"])
def test_a_pass_with_gradients_uses_the_weights_themselves(root: Path, lora: Lora | None) -> None:
    network = load(root, lora)
    before = own_methods(network)

    def gradients() -> list[torch.Tensor]:
        loss = torch.log_softmax(network.logits(network.hidden(*PASS)), -1)[..., 3].sum()
        return list(torch.autograd.grad(loss, [w for w in network.parameters() if w.requires_grad], allow_unused=True))

    expected = gradients()
    DecodeWeights(network).refresh()
    assert own_methods(network) != before
    for own, other in zip(gradients(), expected, strict=True):
        assert torch.equal(own, other) if own is not None else other is None


def test_a_subclass_that_computes_something_else_is_left_alone(tmp_path: Path) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    network = load(write_folders("llama", tmp_path), None)
    special = network.model.model.layers[0].mlp.up_proj
    special.__class__ = Doubled
    x = torch.ones(2, special.in_features)
    with torch.no_grad():
        expected = special(x)
        DecodeWeights(network).refresh()
        assert torch.equal(special(x), expected)
    assert "forward" in network.model.model.layers[0].mlp.down_proj.__dict__


def test_an_evaluation_frees_its_copies(root: Path) -> None:
    network = load(root)
    before = own_methods(network)
    evaluator = Evaluator([s.prompt for s in sequences()], 2, lambda: Decoder(network, SETTINGS, 2))
    product = decode_weights._Product
    with mock.patch.object(product, "use_copy", autospec=True, side_effect=product.use_copy) as copied:
        assert evaluator.answers(version=0, chunk=4) is not None
    assert copied.call_count > 0
    assert own_methods(network) == before


def test_two_decoders_of_one_network_in_any_order() -> None:
    """The one that made copies last uses them until it releases them; otherwise layers use the weights."""
    calls = [(name, number) for name in ("refresh", "release") for number in (0, 1)]
    for order in itertools.product(calls, repeat=4):
        network = init_tiny(TINY, "lm", 0)
        decoders, user = (DecodeWeights(network), DecodeWeights(network)), None
        for name, number in order:
            getattr(decoders[number], name)()
            user = number if name == "refresh" else None if user == number else user
            assert bool(own_methods(network)) == (user is not None), order
            network.logits(network.hidden(*PASS)).sum().backward()


def test_a_layer_under_two_names_uses_one_copy_and_its_weights_afterwards() -> None:
    network = init_tiny(TINY, "lm", 0)
    network.blocks[1].up = network.blocks[0].up
    with torch.no_grad():
        expected = network.hidden(*PASS)
        weights = DecodeWeights(network)
        weights.refresh()
        torch.testing.assert_close(network.hidden(*PASS), expected, rtol=0, atol=1e-5)
        weights.release()
    assert own_methods(network) == {}


def test_all_layers_and_the_tied_head_of_our_own_architecture_use_copies() -> None:
    network = init_tiny(TINY, "lm", 0)
    DecodeWeights(network).refresh()
    linear = [f"blocks.{block}.{name}.forward" for block in (0, 1) for name in ("qkv", "out", "up", "down")]
    assert own_methods(network).keys() == {".logits", *linear}


@pytest.mark.parametrize(("hidden", "layers", "copied"), [(128, 2, False), (256, 4, True)])
def test_copies_begin_between_the_sizes_that_were_measured(
    hidden: int, layers: int, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    network = init_tiny(TinyArchitecture(hidden=hidden, layers=layers, heads=8, context=64, vocab=2048), "lm", 0)
    DecodeWeights(network).refresh()
    assert bool(own_methods(network)) == copied


def test_without_effect_in_other_precisions_and_for_small_networks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for network in (load(root, dtype=torch.float64), load(root, dtype=torch.bfloat16)):
        before = own_methods(network)
        DecodeWeights(network).refresh()
        assert own_methods(network) == before
    monkeypatch.undo()
    network = load(root)
    before = own_methods(network)
    DecodeWeights(network).refresh()
    assert own_methods(network) == before


def test_a_resumed_run_of_our_own_architecture_ends_with_the_same_bits(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, with update overlap, deferral and evaluations; copies are in no checkpoint."""
    monkeypatch.setattr(overlapped, "MIN_PASS_TOKENS", 20)
    product = decode_weights._Product
    spec = world.spec(
        {"steps": 4, "checkpoints": {"every_steps": 2, "keep": 9}, "resources": {"dtype": "float32"}},
        {"overlap": {"chunk": {"size": 16}, "update_overlap": True}},
        {"evaluation": {"prompts": "prompts.jsonl", "every_steps": 1, "count": 3}},
    )
    with mock.patch.object(product, "use_copy", autospec=True, side_effect=product.use_copy) as copied:
        whole = world.run(spec, tmp_path / "whole", inline=True)
        first = copied.call_count
        start = whole.out / "checkpoints" / "step-00000002"
        resumed = world.run(spec, tmp_path / "resumed", inline=True, resume=start)
    assert copied.call_count > first > 0
    assert any(s["response"] and not s["finished"] for s in json.loads((start / "state.json").read_text())["pool"])
    for role in ("actor", "critic"):
        for name, weight in whole.weights(role).items():
            torch.testing.assert_close(resumed.weights(role)[name], weight, rtol=0, atol=0)

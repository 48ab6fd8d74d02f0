"""Defaults that depend on the run: by the number of weights, adapters, and the length of responses."""

from __future__ import annotations

from typing import Any

import pytest

from oppo_contract.chosen_defaults import (
    chosen_defaults,
    critic_learning_rate,
    keep_chosen,
    learning_rate,
    with_chosen,
)
from oppo_contract.spec import RunSpec, load_spec

SMOL = 134_515_008


@pytest.mark.parametrize(
    ("weights", "adapters", "rate"),
    [
        (10**5, False, 3e-4), (SMOL, False, 7e-6), (5 * 10**8, False, 2e-6), (10**9, False, 1e-6), (7 * 10**10, False, 1e-6),
        (10**5, True, 1e-3), (SMOL, True, 3e-4), (10**9, True, 4e-5), (7 * 10**10, True, 4e-5),
    ],
)  # fmt: skip
def test_the_rate_falls_with_the_number_of_weights_and_is_larger_for_adapters(weights: int, adapters: bool, rate: float) -> None:
    assert learning_rate(weights, adapters) == rate
    assert critic_learning_rate(weights, adapters) == pytest.approx(min(1e-3, 10 * rate))


@pytest.mark.parametrize(("longest", "size"), [(1, 8), (24, 8), (40, 8), (64, 16), (127, 16), (128, 32), (4096, 32)])
def test_a_response_has_several_chunks(longest: int, size: int) -> None:
    assert small({"rollout": {"max_new_tokens": longest}}).initial_chunk_size == size
    assert small({"overlap": {"chunk": {"size": 5}}, "rollout": {"max_new_tokens": longest}}).initial_chunk_size == 5


def small(changes: dict[str, Any] | None = None) -> RunSpec:
    tree = {
        "name": "x",
        "steps": 2,
        "data": {"prompts": "p"},
        "models": {"actor": {"path": "a"}, "reward": {"rule": "letters:score"}},
    }
    return load_spec(tree | (changes or {}))


def test_what_is_chosen_has_its_reason_and_what_is_given_stays() -> None:
    lora = {"actor": {"path": "a"}, "reward": {"rule": "letters:score"}, "lora": {"critic": False}}
    spec = small({"models": lora, "rollout": {"max_new_tokens": 24}})
    chosen = chosen_defaults(spec, {"actor": SMOL, "critic": SMOL})
    assert {path: one.value for path, one in chosen.items()} == {
        "overlap.chunk.size": 8, "ppo.learning_rate": 3e-4, "ppo.critic_learning_rate": 7e-5
    }  # fmt: skip
    assert chosen["ppo.learning_rate"].reason == "low-rank adapters of a model with 135 M weights are trained"
    assert chosen["ppo.critic_learning_rate"].reason == "all weights of a model with 135 M weights are trained"
    resolved = with_chosen(spec, chosen)
    assert (resolved.ppo.learning_rate, resolved.overlap.chunk.size) == (3e-4, 8)
    assert chosen_defaults(resolved, {"actor": 1, "critic": 1}) == {}
    assert chosen_defaults(small({"ppo": {"learning_rate": 0.5}}), {}).keys() == {"overlap.chunk.size"}


def test_a_resumed_run_keeps_what_its_checkpoint_was_trained_with() -> None:
    saved = small({"ppo": {"learning_rate": 1e-6, "critic_learning_rate": 1e-5}, "overlap": {"chunk": {"size": 32}}})
    assert keep_chosen(small(), saved) == saved
    assert keep_chosen(small({"ppo": {"learning_rate": 2e-6}}), saved).ppo.learning_rate == 2e-6
    assert keep_chosen(small(), small()) == small()

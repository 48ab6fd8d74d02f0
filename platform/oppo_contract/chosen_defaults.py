"""Defaults that depend on the run: chunk size and learning rates of settings that are left empty. Pure functions.

The engine resolves them once, at the start of a run. A resumed run or fork keeps its checkpoint's values (`keep_chosen`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oppo_contract.spec import RunSpec

ACTOR_RATE, CRITIC_RATE, CHUNK = "ppo.learning_rate", "ppo.critic_learning_rate", "overlap.chunk.size"
# Full training: 1e-6 from a billion weights on, as is usual for RLHF, and inversely proportional below: 7e-6 for 135 M. The
# small models of the examples learn at 3e-4.
FULL_RATE, FULL_WEIGHTS, MAX_FULL_RATE = 1e-6, 10**9, 3e-4
# Adapters start at zero and are few: 135 M weights with LoRA learned at 1e-3 in 20 steps, but drifted by 15 nats per response.
# A third of that is 40 times the rate of full training.
ADAPTER_FACTOR, MAX_RATE = 40, 1e-3
# The critic starts from a new head and has no KL penalty to respect.
CRITIC_FACTOR = 10


@dataclass(frozen=True, slots=True)
class Chosen:
    """A default's value and its reason."""

    value: float
    reason: str


def learning_rate(weights: int, adapters: bool) -> float:
    """The actor's default learning rate, one digit: by the number of weights, and whether only adapters are trained."""
    full = min(MAX_FULL_RATE, FULL_RATE * max(1.0, FULL_WEIGHTS / max(1, weights)))
    return float(f"{min(MAX_RATE, full * ADAPTER_FACTOR) if adapters else full:.0e}")


def critic_learning_rate(weights: int, adapters: bool) -> float:
    """The critic's default learning rate: ten times the actor's, at most 1e-3."""
    return min(MAX_RATE, float(f"{CRITIC_FACTOR * learning_rate(weights, adapters):.0e}"))


def chosen_defaults(spec: RunSpec, weights: Mapping[str, int]) -> dict[str, Chosen]:
    """The value of each empty setting, by its path. `weights`: of `actor` and `critic`; a missing or 0 one is unknown."""
    lora = spec.models.lora
    chosen: dict[str, Chosen] = {}
    if spec.overlap.chunk.size is None:
        longest = spec.rollout.max_new_tokens
        reason = f"a quarter of max_new_tokens, {longest}, as a power of two from 8 to 32"
        chosen[CHUNK] = Chosen(spec.initial_chunk_size, reason)
    if spec.ppo.learning_rate is None and weights.get("actor"):
        chosen[ACTOR_RATE] = _rate(learning_rate, weights["actor"], lora is not None)
    if spec.ppo.critic_learning_rate is None and spec.ppo.has_critic and weights.get("critic"):
        chosen[CRITIC_RATE] = _rate(critic_learning_rate, weights["critic"], lora is not None and lora.critic)
    return chosen


def with_chosen(spec: RunSpec, chosen: Mapping[str, Chosen]) -> RunSpec:
    """The spec with these values instead of empty settings."""
    return _with_values(spec, {path: one.value for path, one in chosen.items()})


def keep_chosen(spec: RunSpec, saved: RunSpec) -> RunSpec:
    """The spec of a resumed run: empty settings keep the value of the checkpoint's spec, `saved`."""
    kept = {
        ACTOR_RATE: (spec.ppo.learning_rate, saved.ppo.learning_rate),
        CRITIC_RATE: (spec.ppo.critic_learning_rate, saved.ppo.critic_learning_rate),
        CHUNK: (spec.overlap.chunk.size, saved.overlap.chunk.size),
    }
    return _with_values(spec, {path: old for path, (new, old) in kept.items() if new is None and old is not None})


def _with_values(spec: RunSpec, values: Mapping[str, float]) -> RunSpec:
    rates = {path.removeprefix("ppo."): value for path, value in values.items() if path.startswith("ppo.")}
    overlap = spec.overlap
    if CHUNK in values:
        overlap = overlap.model_copy(update={"chunk": overlap.chunk.model_copy(update={"size": int(values[CHUNK])})})
    return spec.model_copy(update={"ppo": spec.ppo.model_copy(update=rates), "overlap": overlap})


def _rate(rule: Callable[[int, bool], float], weights: int, adapters: bool) -> Chosen:
    trained = "low-rank adapters" if adapters else "all weights"
    return Chosen(rule(weights, adapters), f"{trained} of a model with {_millions(weights)} weights are trained")


def _millions(weights: int) -> str:
    return f"{weights / 1e6:,.3g} M" if weights < 10**9 else f"{weights / 1e9:,.3g} B"

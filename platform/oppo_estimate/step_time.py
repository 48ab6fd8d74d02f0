"""Time of a PPO step from the shapes of its models: how it grows with rows, tokens and settings, and on a device of known speed.

A closed form of what `oppo simulate` plays through, without torch: stages cost what docs/simulation.md derives them from, and
overlapped stages take as long as the longer one. `oppo_estimate.calibration` scales it to measured runs.
Symbols: B rows per step, L longest response, times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oppo_contract.spec import RunSpec
from oppo_estimate.device_memory import rank_cores, scores_apart
from oppo_estimate.device_speed import Speed
from oppo_estimate.devices import speed as speed_of
from oppo_estimate.items import Role, dtype_bytes_of
from oppo_estimate.memory import evaluation_rows, pass_tokens
from oppo_estimate.response_lengths import Endings
from oppo_estimate.roles import build_roles
from oppo_estimate.shapes import Shape

FORWARD = 2  # operations per weight and token of a forward pass
CORE_GAIN, DECODE_CORE_GAIN = 0.7, 0.3  # what each further core adds to the speed of one (oppo_estimate/machines/cpu-2-*.yaml)
STEP_OVERHEAD_S = 0.01  # prompts, advantages, the step's events
OPTIMIZER_BYTES = 28  # read and written per trained weight in a step of AdamW


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of an average prompt, and how responses end, at the latest after `longest` tokens."""

    prompt: float
    endings: Endings
    longest: int

    @property
    def response(self) -> float:
        """Tokens of an average response."""
        return self.endings.mean(self.longest)


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of each stage of one step.

    `apart`: whether critic and actor are updated at the same time. `streamed`: whether responses are scored while they are
    decoded. What update overlap saves is not modelled.
    """

    decode: float
    score: float
    update_actor: float
    update_critic: float
    other: float
    streamed: bool
    apart: bool

    @property
    def update(self) -> float:
        """Both updates."""
        return max(self.update_actor, self.update_critic) if self.apart else self.update_actor + self.update_critic

    def step_s(self, decode: float = 1.0, rest: float = 1.0) -> float:
        """The step, with the time of decoding and of everything else multiplied by these factors."""
        decoding, scoring = decode * self.decode, rest * self.score
        return (max(decoding, scoring) if self.streamed else decoding + scoring) + rest * (self.update + self.other)


@dataclass(frozen=True, slots=True)
class Workers:
    """Relative speeds of the devices of one rank: decoding, scoring, updating the actor and the critic."""

    decode: float
    score: float
    actor: float
    critic: float


def stages(spec: RunSpec, shapes: Mapping[str, Shape], speed: Speed, lengths: Lengths, cores: int, gpu: bool) -> Stages:
    """One step on devices of this speed; `cores` of a node, whose `speed` is that of one core unless it is a `gpu`."""
    roles = {role.name: role for role in build_roles(spec, shapes)}
    apart, workers = scores_apart(spec, cores, gpu), _workers(spec, cores, gpu)
    actor, rows = roles["actor"], spec.ppo.rows / spec.resources.ranks
    tokens = rows * (lengths.prompt + lengths.response)
    decode = _decode_s(actor.shape, speed, rows, decode_rounds(spec, lengths.endings), lengths, spec)
    readers = [role for role in roles.values() if role.name != "actor"]
    score = sum(_pass_s(role.shape, speed, tokens) for role in readers)
    critic = _update_s(spec, roles["critic"], speed, tokens) if "critic" in roles else 0.0
    other = STEP_OVERHEAD_S + _evaluation_s(spec, actor.shape, speed, lengths) / workers.decode
    return Stages(
        decode=decode / workers.decode,
        score=score / workers.score,
        update_actor=_update_s(spec, actor, speed, tokens) / workers.actor,
        update_critic=critic / workers.critic,
        other=other,
        # Sharded models are read by the trainer; what services and vLLM read meanwhile is not estimated.
        streamed=spec.overlap.intra_step != "off" and (gpu or apart) and not spec.training.shards_weights,
        apart=apart,
    )


def _workers(spec: RunSpec, cores: int, gpu: bool) -> Workers:
    if gpu:
        decoding = max(1.0, spec.resources.decoding_devices / spec.resources.ranks_per_node)
        return Workers(decoding, 1.0, 1.0, 1.0)
    total = rank_cores(spec, cores)
    if not scores_apart(spec, cores, gpu):
        whole = speed_of(total, CORE_GAIN)
        return Workers(speed_of(total, DECODE_CORE_GAIN), whole, whole, whole)
    acting = total - total // 2
    scoring = speed_of(total - acting, CORE_GAIN)
    updating = acting if spec.ppo.has_critic else total
    return Workers(speed_of(acting, DECODE_CORE_GAIN), scoring, speed_of(updating, CORE_GAIN), scoring)


def decode_rounds(spec: RunSpec, endings: Endings) -> float:
    """Expected decode steps of one PPO step: until the batch's last response ends, or with deferral its B-th of B + Δ."""
    return endings.rounds(spec.ppo.rows, spec.initial_overcommit * spec.ppo.group_size, spec.rollout.max_new_tokens)


def _decode_s(shape: Shape, speed: Speed, rows: float, rounds: float, lengths: Lengths, spec: RunSpec) -> float:
    """Prefill of the prompts, and `rounds` decode steps: layers, weights and KV cache read, and operations per token."""
    dtype_bytes = dtype_bytes_of(spec)
    prefill = _pass_s(shape, speed, rows * lengths.prompt)
    fixed = rounds * (shape.layers * speed.layer_s + shape.weights * dtype_bytes / speed.bandwidth)
    tokens = rows * lengths.response
    attended = tokens * (lengths.prompt + lengths.response / 2)
    read = attended * shape.cached * dtype_bytes / speed.bandwidth
    return prefill + fixed + tokens * FORWARD * shape.weights / speed.decode_flops + read


def _pass_s(shape: Shape, speed: Speed, tokens: float) -> float:
    return tokens * FORWARD * shape.weights / speed.flops


def _update_s(spec: RunSpec, role: Role, speed: Speed, tokens: float) -> float:
    """Forward and backward passes of all epochs, log-probs or values of passes that are not retained, and optimizer steps."""
    forward = _pass_s(role.shape, speed, tokens)
    # Gradients of the activations, and of the weights that are trained.
    backward = forward * (1 + role.trained / max(1, role.shape.weights)) + (forward if spec.training.recompute == "full" else 0)
    retains = spec.ppo.optimizer_steps == 1 and not spec.training.shards_weights
    retained = spec.training.retained_passes * pass_tokens(spec)[0] if retains else 0
    before = forward * max(0.0, 1 - retained / max(1.0, tokens))
    optimizer = spec.ppo.optimizer_steps * role.trained * OPTIMIZER_BYTES / speed.bandwidth
    return before + spec.ppo.epochs * (forward + backward) + optimizer


def _evaluation_s(spec: RunSpec, shape: Shape, speed: Speed, lengths: Lengths) -> float:
    """An evaluation's share of one step."""
    if spec.evaluation is None:
        return 0.0
    rows = evaluation_rows(spec, spec.evaluation.count)
    batches = spec.evaluation.count / spec.resources.ranks / rows
    rounds = lengths.endings.rounds(rows, 0, spec.rollout.max_new_tokens)
    return batches * _decode_s(shape, speed, rows, rounds, lengths, spec) / spec.evaluation.every_steps

"""Reference PPO, written from the equations of docs/algorithm.md and independent of `oppo_core`: one token at a time.

No padding, KV cache or batching: every sequence is computed alone, from its first token, by a transformer defined here.
Weights are dictionaries of float64 tensors. Gradients come from autograd, AdamW is done by hand.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.engine.ppo.oracle_network import Weights, grown_states, states

BETAS, EPS = (0.9, 0.95), 1e-8


def philox(seed: int, use: int, index: int) -> np.random.Generator:
    """Random numbers of one use (0 sampling, 2 mini-batches, 4 pretraining) and one index."""
    return np.random.Generator(np.random.Philox(key=[seed, use * 2**56 + index]))


def left_by(rollout: Any, logits: list[float]) -> list[int]:
    """Ids that top-k, top-p and min-p keep of tempered logits, most likely first, ties by id."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    shares = [math.exp(logits[token] - logits[order[0]]) for token in order]
    if rollout.top_k is not None:
        order, shares = order[: rollout.top_k], shares[: rollout.top_k]
    fewest = len(order)
    if rollout.top_p is not None:
        fewest = min(n for n in range(1, len(order) + 1) if sum(shares[:n]) / sum(shares) >= rollout.top_p or n == len(order))
    if rollout.min_p is not None:
        fewest = min(fewest, sum(share >= rollout.min_p for share in shares))
    return order[:fewest]


def only(logits_V: Tensor, ids: list[int]) -> Tensor:
    """Log-probs [V] over `ids` only; hugely negative for all other ids."""
    chosen = torch.log_softmax(logits_V[ids], -1)
    return torch.full_like(logits_V, -1.7e308).index_put((torch.tensor(ids),), chosen)


@dataclass(slots=True)
class Answer:
    """A trained answer: its tokens and the policy version of each."""

    sequence_id: int
    prompt: list[int]
    response: list[int]
    versions: list[int]
    ended_by_eos: bool
    support: list[list[int]] = field(default_factory=list)  # the support of each token; empty: all ids
    kept_since: int | None = None  # the version that its prompt was cached under, when caches outlive updates

    @property
    def tokens(self) -> list[int]:
        """Prompt and response."""
        return self.prompt + self.response


@dataclass(slots=True)
class Adam:
    """AdamW by hand, with the gradient clipped by its global norm first."""

    rate: Callable[[int], float]
    decay: float
    max_norm: float
    count: int = 0
    first: Weights = field(default_factory=dict)
    second: Weights = field(default_factory=dict)

    def apply(self, weights: Weights, loss: Tensor, step: int) -> tuple[Weights, float]:
        """New weights, and the gradient's norm before clipping; `step` counts PPO steps from 0."""
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()), allow_unused=True), strict=True))
        gradients = {name: torch.zeros_like(weights[name]) if g is None else g for name, g in gradients.items()}
        length = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        shrink = min(1.0, self.max_norm / (length + 1e-6))
        rate = self.rate(step)
        self.count += 1
        updated = {}
        for name, weight in weights.items():
            g = gradients[name] * shrink
            m = self.first[name] = BETAS[0] * self.first.get(name, 0 * g) + (1 - BETAS[0]) * g
            v = self.second[name] = BETAS[1] * self.second.get(name, 0 * g) + (1 - BETAS[1]) * g * g
            m_hat, v_hat = m / (1 - BETAS[0] ** self.count), v / (1 - BETAS[1] ** self.count)
            decayed = weight.detach() * (1 - rate * self.decay)
            updated[name] = decayed - rate * m_hat / (v_hat.sqrt() + EPS)
        return updated, length


def rate(peak: float, warmup: int, kind: str, final: float, steps: int, step: int) -> float:
    """Learning rate of trained step `step` of `steps`: up to the peak in `warmup`, then down to `final` of it at the end."""
    top = max(warmup, 1) - 1
    if step < warmup:
        return peak * (step + 1) / warmup
    if kind == "constant":
        return peak
    fallen = (step - top) / (steps - 1 - top)
    low = peak * final
    return peak + (low - peak) * fallen if kind == "linear" else low + (peak - low) * math.cos(math.pi * fallen / 2) ** 2


def clamp(x: float, low: float, high: float) -> float:
    """`x` within [low, high]."""
    return min(max(x, low), high)


def kl_of(log_ratio: Tensor, estimator: str) -> Tensor:
    """k1, k2, k3 or k3+ of one token."""
    log_ratio = log_ratio.clamp(-20, 20)
    k2, k3 = log_ratio**2 / 2, torch.exp(-log_ratio) - 1 + log_ratio
    return {"k1": log_ratio, "k2": k2, "k3": k3, "k3+": k3.detach() - k2.detach() + k2}[estimator]


def double_sum_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = Σ_k (γλ)^k δ_{t+k}, straight from the definition; the value after the last token is 0."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def against_the_group(rewards: list[float], group: list[float], ppo: Any) -> list[float]:
    """GRPO's and RLOO's advantage of each answer of one group, straight from their papers' formulas."""
    mean = sum(group) / len(group)
    if ppo.algorithm == "rloo":
        return [r - (sum(group) - r) / (len(group) - 1) for r in rewards]
    deviation = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1)) + 1e-6
    return [(r - mean) / (deviation if ppo.normalize_advantages_by_std else 1.0) for r in rewards]


def whitened(rows: list[list[float]]) -> list[list[float]]:
    """Zero mean, unit unbiased variance over all tokens of the batch."""
    flat = [a for row in rows for a in row]
    mean = sum(flat) / len(flat)
    variance = sum((a - mean) ** 2 for a in flat) / (len(flat) - 1)
    return [[(a - mean) / math.sqrt(variance + 1e-8) for a in row] for row in rows]


@dataclass(slots=True)
class Told:
    """The oracle's results of one step, one list per sequence."""

    raw: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    rewards: list[list[float]] = field(default_factory=list)
    advantages: list[list[float]] = field(default_factory=list)
    returns: list[list[float]] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    proximal: list[list[float]] = field(default_factory=list)
    reference: list[list[float]] = field(default_factory=list)
    kl: list[list[float]] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Oracle:
    """The four roles and the two optimizers. `history[v]` are the actor's weights after v steps."""

    def __init__(self, spec: Any, actor: Weights, critic: Weights | None, reward: Weights, heads: int) -> None:
        ppo = spec.ppo
        self.spec, self.ppo, self.heads = spec, ppo, heads
        self.reference, self.reward, self.critic = actor, reward, critic or {}
        self.history = [actor]
        self.kl_coefficient = ppo.kl.coefficient
        self.raw: list[float] = []
        self.average = actor
        self.texts: list[list[int]] = []
        late, slow = ppo.value_warmup_steps, ppo.warmup_steps if ppo.critic_warmup_steps is None else ppo.critic_warmup_steps
        self.actor_adam = Adam(
            lambda step: rate(ppo.learning_rate, ppo.warmup_steps, ppo.schedule, ppo.final_rate, spec.steps - late, step - late),
            ppo.weight_decay, ppo.max_grad_norm,
        )  # fmt: skip
        self.critic_adam = Adam(
            lambda step: rate(ppo.critic_learning_rate, slow, ppo.critic_schedule, ppo.final_rate, spec.steps, step),
            ppo.weight_decay, ppo.max_grad_norm,
        )  # fmt: skip

    def logits(self, weights: Weights, tokens: list[int]) -> Tensor:
        """Next-token logits [T, V] at the spec's temperature."""
        return states(weights, tokens, self.heads) @ weights["embedding.weight"].T / self.spec.rollout.temperature

    def log_tables(self, weights: Weights, answer: Answer) -> list[Tensor]:
        """Before each response token: log-probs [V], what the token was not chosen among shut out."""
        return self._tables(self.logits(weights, answer.tokens)[len(answer.prompt) - 1 : -1], answer)

    def _tables(self, rows: Tensor, answer: Answer) -> list[Tensor]:
        if not answer.support:
            return list(torch.log_softmax(rows, -1))
        return [only(row, ids) for row, ids in zip(rows, answer.support, strict=True)]

    def logprobs(self, weights: Weights, answer: Answer) -> Tensor:
        """Log-prob of each response token."""
        tables = self.log_tables(weights, answer)
        return torch.stack([table[token] for table, token in zip(tables, answer.response, strict=True)])

    def scalars(self, weights: Weights, tokens: list[int]) -> Tensor:
        """The scalar head's value at every position."""
        return states(weights, tokens, self.heads) @ weights["head.weight"][0] + weights["head.bias"][0]

    def values(self, weights: Weights, answer: Answer) -> Tensor:
        """The value predicted before each response token."""
        return self.scalars(weights, answer.tokens)[len(answer.prompt) - 1 : -1]

    def sampled_from(self, answer: Answer) -> Tensor:
        """Tempered logits [T, V] that each response token was sampled from: of its version, after the prefix as it was cached."""
        first = len(answer.prompt) - 1
        if answer.kept_since is None:
            by_version = {v: self.logits(self.history[v], answer.tokens) for v in sorted(set(answer.versions))}
            return torch.stack([by_version[v][first + t] for t, v in enumerate(answer.versions)])
        weights = [self.history[v] for v in [answer.kept_since] * first + answer.versions]
        rows = [
            w["embedding.weight"] @ h for w, h in zip(weights, grown_states(weights, answer.tokens[:-1], self.heads), strict=True)
        ]
        return torch.stack(rows[first:]) / self.spec.rollout.temperature

    def draw(self, logits: Tensor, sequence_id: int, position: int) -> tuple[int, float]:
        """Token number `position` of a response by inverting the cumulative distribution, and its log-prob."""
        logp = only(logits, left_by(self.spec.rollout, logits.tolist()))
        number = philox(self.spec.seed, 0, sequence_id).random(position + 1)[position]
        cumulative = 0.0
        for token, probability in enumerate(logp.exp().tolist()):
            cumulative += probability
            if number < cumulative:
                return token, float(logp[token])
        raise AssertionError("rounding left no token")

    def step(self, batch: list[Answer]) -> Told:
        """One PPO step on a complete batch, in sequence_id order."""
        version = len(self.history) - 1
        with torch.no_grad():
            told = self._experience(batch, version)
        told.metrics |= self._train_actor(batch, told, version)
        told.metrics |= self._train_critic(batch, told, version) if self.critic else {}
        if self.ppo.kl.controller == "adaptive":
            kl = [k for row in told.kl for k in row]
            error = clamp(sum(kl) / len(kl) / self.ppo.kl.target - 1, -0.2, 0.2)
            self.kl_coefficient *= 1 + error * len(batch) / self.ppo.kl.horizon
        return told

    def _experience(self, batch: list[Answer], version: int) -> Told:
        told, ppo = Told(), self.ppo
        told.raw = [float(self.scalars(self.reward, answer.tokens)[-1]) for answer in batch]
        self.raw += told.raw
        for answer, raw in zip(batch, told.raw, strict=True):
            proximal = self.logprobs(self.history[version], answer)
            reference = self.logprobs(self.reference, answer)
            penalty = kl_of(proximal - reference, ppo.kl.estimator).tolist()
            score = self.shaped(raw, answer)
            rewards = [-self.kl_coefficient * k if ppo.kl.placement == "reward" else 0.0 for k in penalty]
            rewards[-1] += score
            told.scores.append(score)
            told.rewards.append(rewards)
            told.kl.append(kl_of(proximal - reference, "k1").tolist())
            told.proximal.append(proximal.tolist())
            told.reference.append(reference.tolist())
            told.weights.append(self._importance(answer, told.proximal[-1], version))
        if self.critic:
            self._judge_by_critic(batch, told)
        else:
            self._judge_by_group(batch, told)
        return told

    def _judge_by_critic(self, batch: list[Answer], told: Told) -> None:
        if self.ppo.whiten_rewards:
            mean = statistics.fmean(r for row in told.rewards for r in row)
            told.rewards = [[r + mean for r in row] for row in whitened(told.rewards)]
        for answer, rewards in zip(batch, told.rewards, strict=True):
            values = self.values(self.critic, answer).tolist()
            advantages = double_sum_gae(rewards, values, self.ppo.gamma, self.ppo.gae_lambda)
            told.values.append(values)
            told.advantages.append(advantages)
            told.returns.append([a + v for a, v in zip(advantages, values, strict=True)])
        if self.ppo.whiten_advantages:
            told.advantages = whitened(told.advantages)

    def _judge_by_group(self, batch: list[Answer], told: Told) -> None:
        for answer, rewards in zip(batch, told.rewards, strict=True):
            same = [
                sum(row) for other, row in zip(batch, told.rewards, strict=True)
                if other.sequence_id // self.ppo.group_size == answer.sequence_id // self.ppo.group_size
            ]  # fmt: skip
            assert len(same) == self.ppo.group_size, "a group was split"
            told.advantages.append(against_the_group([sum(rewards)], same, self.ppo) * len(rewards))

    def shaped(self, score: float, answer: Answer) -> float:
        """What stands on the last token of an answer whose raw score is `score`; all raw scores so far are in `self.raw`."""
        ppo = self.ppo
        if ppo.normalize_scores == "running":
            score = (score - statistics.fmean(self.raw)) / math.sqrt(statistics.variance(self.raw) + 1e-8)
        score *= ppo.score_scale
        if not answer.ended_by_eos:
            score -= ppo.missing_eos_penalty
        score -= ppo.length_penalty * sum(1 for t in range(len(answer.response)) if t >= ppo.length_penalty_from)
        return score if ppo.score_clip is None else clamp(score, -ppo.score_clip, ppo.score_clip)

    def behaviour(self, answer: Answer) -> list[float]:
        """Log-prob of each token under the weights it was sampled with, its prefix read under those same weights, or kept."""
        tables = self._tables(self.sampled_from(answer), answer)
        return [float(table[token]) for table, token in zip(tables, answer.response, strict=True)]

    def _importance(self, answer: Answer, proximal: list[float], version: int) -> list[float]:
        weights = list[float | None]()
        for logp, old, sampled in zip(proximal, self.behaviour(answer), answer.versions, strict=True):
            stale = sampled < version or (answer.kept_since is not None and answer.kept_since < version)
            corrected = {"off": False, "stale": stale, "all": True}[self.ppo.tis]
            weights.append(math.exp(clamp(logp - old, -20, 20)) if corrected else None)
        return self._bounded(weights)

    def _bounded(self, ratios: list[float | None]) -> list[float]:
        """Weights of an answer's tokens; None: not corrected."""
        low, high, outside = self.ppo.tis_floor, self.ppo.tis_cap, self.ppo.tis_outside
        known = [ratio for ratio in ratios if ratio is not None]
        if outside == "reject" and known and not low <= statistics.geometric_mean(known) <= high:
            return [0.0] * len(ratios)
        if outside == "mask":
            return [1.0 if ratio is None else ratio * (low <= ratio <= high) for ratio in ratios]
        return [1.0 if ratio is None else clamp(ratio, low, high) for ratio in ratios]

    def _mini_batches(self, size: int, step: int, epoch: int) -> list[list[int]]:
        groups = np.arange(size // self.ppo.group_size)
        if self.ppo.mini_batches > 1:
            philox(self.spec.seed, 2, 65536 * step + epoch).shuffle(groups)
        rows = [int(group) * self.ppo.group_size + member for group in groups for member in range(self.ppo.group_size)]
        share = size // self.ppo.mini_batches
        return [rows[k : k + share] for k in range(0, size, share)]

    def _train_actor(self, batch: list[Answer], told: Told, step: int) -> dict[str, float]:
        weights, sums, norms = self.history[-1], np.zeros(6), []
        if step < self.ppo.value_warmup_steps:
            self.history.append(weights)
            return {"actor/lr": 0.0}
        for epoch in range(self.ppo.epochs):
            for number, rows in enumerate(self._mini_batches(len(batch), step, epoch)):
                weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
                loss, parts = self._policy_loss(weights, [(batch[r], r) for r in rows], told)
                if self.ppo.pretraining is not None:
                    loss = loss + self.ppo.pretraining.coefficient * self._text_loss(weights, step, number)
                sums += parts
                weights, length = self.actor_adam.apply(weights, loss, step)
                norms.append(length)
        self.history.append({name: weight.detach() for name, weight in weights.items()})
        if self.ppo.ema_decay is not None:
            keep = self.ppo.ema_decay
            self.average = {name: keep * old + (1 - keep) * self.history[-1][name] for name, old in self.average.items()}
        names = ("actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy")
        told_too = {"actor/grad_norm": float(np.mean(norms)), "actor/lr": self.actor_adam.rate(step)}
        return told_too | dict(zip(names, sums[:4] / sums[[5, 4, 4, 4]], strict=True))

    def _policy_loss(self, weights: Weights, rows: list[tuple[Answer, int]], told: Told) -> tuple[Tensor, Any]:
        ppo, terms, sums = self.ppo, list[Tensor](), np.zeros(6)
        high = ppo.clip_range if ppo.clip_range_high is None else ppo.clip_range_high
        for answer, row in rows:
            limit = self.spec.rollout.max_new_tokens
            scale = {"token_mean": 1, "sequence_mean": 1 / len(answer.response), "token_sum": 1 / limit}[ppo.loss_aggregation]
            for t, (token, at) in enumerate(zip(answer.response, self.log_tables(weights, answer), strict=True)):
                advantage, log_ratio = told.advantages[row][t], at[token] - told.proximal[row][t]
                ratio = torch.exp(log_ratio.clamp(-20, 20))
                plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - ppo.clip_range, 1 + high)
                term = torch.maximum(plain, clipped)
                if ppo.dual_clip is not None and advantage < 0 and float(term.detach()) > -advantage * ppo.dual_clip:
                    term = term * 0 - advantage * ppo.dual_clip
                term = term * told.weights[row][t]
                possible = at[at > -1e300]
                entropy = -(possible.exp() * possible).sum()
                told_of = (scale * term.detach(), clipped > plain, -log_ratio.detach(), entropy.detach(), 1, 0)
                sums += np.asarray([float(x) for x in told_of])
                if ppo.kl.placement == "loss":
                    kl = kl_of(at[token] - told.reference[row][t], ppo.kl.estimator)
                    term = term + self.kl_coefficient * told.weights[row][t] * kl
                terms.append(scale * (term - ppo.entropy_coefficient * entropy))
        sums[5] = divisor = len(terms) if ppo.loss_aggregation == "token_mean" else len(rows)
        return sum(terms, torch.zeros(())) / divisor, sums

    def _text_loss(self, weights: Weights, step: int, number: int) -> Tensor:
        """Mean next-token loss of mini-batch `number`'s share of the step's texts."""
        settings, size = self.ppo.pretraining, len(self.texts)
        losses = []
        for k in range(step * settings.sequences + number, (step + 1) * settings.sequences, self.ppo.mini_batches):
            order = np.arange(size)
            philox(self.spec.seed, 4, k // size).shuffle(order)
            text = self.texts[order[k % size]][: settings.max_tokens]
            table = torch.log_softmax(states(weights, text, self.heads) @ weights["embedding.weight"].T, -1)
            losses += [-table[t, text[t + 1]] for t in range(len(text) - 1)]
        return sum(losses, torch.zeros(())) / len(losses)

    def _train_critic(self, batch: list[Answer], told: Told, step: int) -> dict[str, float]:
        weights, norms, losses, clips = self.critic, list[float](), list[float](), list[bool]()
        for epoch in range(self.ppo.epochs):
            for rows in self._mini_batches(len(batch), step, epoch):
                weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
                terms = []
                for row in rows:
                    for t, value in enumerate(self.values(weights, batch[row])):
                        term, clipped = self._value_loss(value, told.values[row][t], told.returns[row][t])
                        terms.append(term)
                        clips.append(clipped)
                losses += [float(term.detach()) for term in terms]
                weights, length = self.critic_adam.apply(weights, sum(terms, torch.zeros(())) / len(terms), step)
                norms.append(length)
        self.critic = {name: weight.detach() for name, weight in weights.items()}
        names = ("critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm")
        told_too = {"critic/lr": self.critic_adam.rate(step)}
        return told_too | dict(zip(names, (float(np.mean(x)) for x in (losses, clips, norms)), strict=True))

    def _value_loss(self, value: Tensor, old: float, target: float) -> tuple[Tensor, bool]:
        plain, moved = (value - target) ** 2, float(value.detach()) - old
        if self.ppo.value_clip_range is None or abs(moved) <= self.ppo.value_clip_range:
            return plain / 2, False
        bound = old + math.copysign(self.ppo.value_clip_range, moved)
        clipped = (value * 0 + bound - target) ** 2
        return torch.maximum(plain, clipped) / 2, bool(clipped > plain)

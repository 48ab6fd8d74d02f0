"""A step's metrics, under the names of verl, TRL (`objective/*`) and OPPO (docs/metrics.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.ppo.batch_rows import BatchRows
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.losses import LOG_RATIO_LIMIT
from oppo_core.ppo.scored import Scored
from oppo_core.rollout.pool import Pool
from oppo_core.rollout.sequence import Sequence

NGRAM = 4
# Odd weights of a polynomial hash modulo 2^64.
HASH_WEIGHTS = np.cumprod(np.full(NGRAM, 6364136223846793005, dtype=np.uint64), dtype=np.uint64)


@dataclass(slots=True)
class Cohorts:
    """Response lengths by the step in which a sequence was started: the reference for `oppo/length_bias`."""

    started: dict[int, int] = field(default_factory=dict)
    finished: dict[int, list[int]] = field(default_factory=dict)
    newest_mean: float = float("nan")
    newest: int = -1

    def begin(self, cohort: int, count: int) -> None:
        """Record that `count` sequences were started in step `cohort`."""
        if count:
            self.started[cohort] = self.started.get(cohort, 0) + count

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """Record finished sequences. The newest complete cohort gives the reference length."""
        for sequence in sequences:
            lengths = self.finished.setdefault(sequence.cohort, [])
            lengths.append(sequence.length)
            if len(lengths) == self.started[sequence.cohort]:
                if sequence.cohort > self.newest:
                    self.newest, self.newest_mean = sequence.cohort, float(np.mean(lengths))
                del self.started[sequence.cohort], self.finished[sequence.cohort]


def spread(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    """mean, max and min of `values` under `name/…`."""
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}


def experience_metrics(experience: Experience, kl_coefficient: float, max_new_tokens: int) -> dict[str, float]:
    """Metrics of the batch itself: scores, rewards, KL, advantages, lengths. Collective."""
    e, batch = experience, experience.batch
    lengths = np.asarray([s.length for s in batch.sequences], dtype=np.float64)
    prompts = np.asarray([len(s.prompt) for s in batch.sequences], dtype=np.float64)
    repeated_B = batch.gather(torch.tensor([repetition(s.response) for s in e.sequences], dtype=torch.float64))
    metrics = spread("critic/raw_score", e.raw_scores.numpy())
    metrics |= {"critic/raw_score/running_mean": e.moments.mean, "critic/raw_score/running_std": e.moments.deviation}
    metrics |= spread("critic/score", e.scores.numpy()) | spread("critic/rewards", e.reward_sums.numpy())
    metrics |= batch.spread("critic/advantages", e.advantages[e.mask])
    metrics |= spread("response_length", lengths) | spread("prompt_length", prompts)
    metrics |= {f"response_length/p{q}": float(np.percentile(lengths, q)) for q in (10, 25, 50, 75, 90)}
    endings = [s.ending for s in batch.sequences]
    return metrics | {
        "response/repetition": float(repeated_B.mean()),
        "response_length/clip_ratio": float((lengths >= max_new_tokens).mean()),
        **{f"response_ended/{how}": endings.count(how) / len(endings) for how in ("eos", "stop", "length")},
        "objective/kl": float(e.kl_sums.mean()),
        "objective/kl_per_token": float(e.kl_sums.sum()) / batch.tokens,
        "objective/kl_coefficient": kl_coefficient,
        "objective/scores": float(e.scores.mean()),
        "objective/rlhf_reward": float(e.reward_sums.mean()),
        "objective/non_score_reward": float((e.reward_sums - e.scores).mean()),
    }


def repetition(tokens: list[int]) -> float:
    """Share of a response's 4-grams that occurred in it before: 1 − distinct ÷ all; 0 for fewer than five tokens."""
    if len(tokens) <= NGRAM:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, dtype=np.uint64), NGRAM)
    hashes = (grams * HASH_WEIGHTS).sum(-1, dtype=np.uint64)  # different 4-grams practically never have the same
    return 1 - len(np.unique(hashes)) / len(hashes)


def part_metrics(rows: BatchRows, scored: list[Scored], sources: int) -> dict[str, float]:
    """Raw scores of each of the reward's `sources`, if there are several, numbered from 0 as in the spec. Collective.

    Also the prefix-cache hit rate of vLLM reward models. `scored`: this rank's rows.
    """
    columns = sources if sources > 1 else 0
    own = torch.tensor([(*row.cached, *row.parts[:columns]) for row in scored], dtype=torch.float64)
    read, hits, *parts = rows.gather(own.view(len(scored), 2 + columns)).T
    metrics = {"oppo/reward_cached_share": float(hits.sum() / read.sum())} if read.sum() else {}
    for number, part in enumerate(parts):
        metrics |= spread(f"critic/score_part/{number}", part.numpy())
    return metrics


def value_metrics(experience: Experience) -> dict[str, float]:
    """Returns, the critic's values, and the variance they explain. Collective."""
    returns, values = (column[experience.mask] for column in (experience.returns, experience.values))
    batch = experience.batch
    variance, unexplained = batch.variance(returns), batch.variance(returns - values)
    explained = 1 - unexplained / variance if variance > 0 else float("nan")
    metrics = batch.spread("critic/returns", returns) | batch.spread("critic/values", values)
    return metrics | {"critic/vf_explained_var": explained}


def uniform_groups(scores_B: Tensor, group_size: int) -> int:
    """Number of groups whose responses all have the same score, and therefore advantage 0."""
    grouped = scores_B.view(-1, group_size)
    return int((grouped == grouped[:, :1]).all(-1).sum())


def tail_batch_metrics(pool: Pool) -> dict[str, float]:
    """Tokens that tail batching discarded in this step, and responses in its queue."""
    wasted = sum(sequence.length for sequence in pool.discarded)
    return {"oppo/wasted_tokens": float(wasted), "oppo/queued": float(len(pool.queue))}


def overlap_metrics(
    experience: Experience, overcommit: float, chunk_size: int, deferred: float, cohorts: Cohorts
) -> dict[str, float]:
    """Effects of deferral on this batch: ages, staleness, effective sample size, length bias. Collective."""
    mask, stale, batch = experience.mask, experience.stale, experience.batch
    signed = (experience.proximal_logp - experience.behaviour_logp)[mask]
    drift, log_ratio, weights = signed.abs(), signed.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), experience.weights[mask]
    is_stale = stale[mask]
    ages = [s.age for s in batch.sequences]
    metrics = {
        "oppo/overcommit": float(overcommit),
        "oppo/chunk_size": float(chunk_size),
        "oppo/deferred": float(deferred),
        "oppo/deferred_share": sum(age > 0 for age in ages) / len(ages),
        "oppo/deferred_token_share": batch.mean(is_stale),
        "oppo/age_max": float(max(ages)),
        "oppo/age_mean": float(np.mean(ages)),
        # Schulman's k3 estimate of KL(behaviour ‖ proximal), over tokens that the behaviour policy sampled.
        "oppo/mismatch_kl": batch.mean(torch.exp(log_ratio) - 1 - log_ratio),
        "oppo/mismatch_ratio_max": math.exp(batch.largest(log_ratio.abs())),
        "oppo/masked_share": batch.mean(weights == 0),
        "oppo/ess": batch.effective_share(weights),
        "oppo/length_bias": batch.tokens / len(ages) / cohorts.newest_mean if cohorts.newest_mean else float("nan"),
    }
    for name, chosen in (("fresh", ~is_stale), ("stale", is_stale)):
        mean, largest = batch.mean(drift[chosen]), batch.largest(drift[chosen])
        if math.isfinite(mean):
            metrics |= {f"oppo/behaviour_prox_kl/{name}_mean": mean, f"oppo/behaviour_prox_kl/{name}_max": largest}
    return metrics

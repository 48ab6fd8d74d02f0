"""The engine against an independent reference PPO (oracle.py): float64, agreement to 1e-9."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from oppo_contract.spec import ModelSpec
from oppo_core.models.model_io import load_model
from oppo_core.rollout.sampling_support import decode_support
from tests.engine.conftest import VOCAB
from tests.engine.ppo.oracle import Answer, Oracle, left_by

STEPS, TOLERANCE = 5, 1e-9
SMALL = {"steps": STEPS, "rollout": {"max_new_tokens": 40}}
# Together they use every branch of the loss.
OFF: dict[str, dict[str, Any]] = {
    "two epochs, clipped, KL in the reward": {
        "ppo": {
            "epochs": 2, "mini_batches": 2, "warmup_steps": 3, "weight_decay": 0.1, "missing_eos_penalty": 0.3, "score_clip": 1.5,
            "gamma": 0.98, "gae_lambda": 0.9, "kl": {"coefficient": 0.1, "estimator": "k1"}, "value_clip_range": 0.05,
            "clip_range": 0.02,
        },
        "rollout": {"temperature": 0.8},
    },
    "KL in the loss, entropy, dual clip, raw advantages": {
        "ppo": {
            "epochs": 3, "whiten_advantages": False, "value_clip_range": None, "entropy_coefficient": 0.02, "dual_clip": 1.05,
            "clip_range": 0.01, "clip_range_high": 0.03, "max_grad_norm": 0.2, "loss_aggregation": "sequence_mean",
            "kl": {"coefficient": 0.2, "estimator": "k2", "placement": "loss"},
        },
    },
    "every way of shaping a score, schedules of their own": {
        "ppo": {
            "score_scale": 1.7, "normalize_scores": "running", "missing_eos_penalty": 0.3, "length_penalty": 0.02,
            "length_penalty_from": 12, "score_clip": 1.2, "whiten_rewards": True, "schedule": "cosine", "warmup_steps": 2,
            "critic_schedule": "linear", "critic_warmup_steps": 0, "final_rate": 0.2,
        },
    },
    "the critic's head start, then a falling rate": {
        "ppo": {"value_warmup_steps": 2, "schedule": "linear", "final_rate": 0.0, "mini_batches": 3, "learning_rate": 6e-3},
    },
    "a moving average, and texts mixed in": {
        "ppo": {
            "ema_decay": 0.8, "epochs": 2, "mini_batches": 2, "micro_batch_tokens": 60, "value_warmup_steps": 1,
            "pretraining": {"data": "texts.jsonl", "coefficient": 0.7, "sequences": 4, "max_tokens": 15},
        },
        "rollout": {"temperature": 0.7},
    },
    "adaptive KL": {"ppo": {"kl": {"controller": "adaptive", "target": 0.01, "horizon": 20, "estimator": "k2"}}},
}  # fmt: skip
DEFER: dict[str, dict[str, Any]] = {
    "stale tokens weighted": {"ppo": {"tis": "stale", "tis_cap": 1.1}},
    "all tokens weighted": {"ppo": {"tis": "all", "epochs": 2}, "overlap": {"intra_step": "per_chunk"}},
    "shaped, scheduled, the critic first": {
        "ppo": {
            "normalize_scores": "running",
            "score_clip": 1.0,
            "length_penalty": 0.01,
            "whiten_rewards": True,
            "schedule": "linear",
            "value_warmup_steps": 1,
            "warmup_steps": 2,
        },
        "overlap": {"intra_step": "per_chunk"},
    },
    "texts mixed in, averaged": {
        "ppo": {
            "ema_decay": 0.5,
            "epochs": 2,
            "tis": "all",
            "pretraining": {"data": "texts.jsonl", "coefficient": 2.0, "sequences": 3, "max_tokens": 64},
        },
        "overlap": {"overcommit": {"initial": 6, "min": 6, "max": 6}},
    },
    "none weighted": {"ppo": {"tis": "off"}},
    "masked outside the bounds": {"ppo": {"tis_floor": 0.9, "tis_cap": 1.1, "tis_outside": "mask"}},
    "responses rejected, KL in the loss": {
        "ppo": {
            "tis": "all",
            "tis_floor": 0.98,
            "tis_cap": 1.02,
            "tis_outside": "reject",
            "kl": {"coefficient": 0.2, "estimator": "k3+", "placement": "loss"},
        },
    },
    "filtered, KL in the loss, entropy": {
        "rollout": {"top_k": 30, "top_p": 0.9, "min_p": 0.002, "temperature": 1.2},
        "ppo": {"entropy_coefficient": 0.02, "epochs": 2, "kl": {"coefficient": 0.2, "estimator": "k3", "placement": "loss"}},
        "overlap": {"intra_step": "per_chunk", "overcommit": {"initial": 6, "min": 6, "max": 6}},
    },
    "caches kept": {"overlap": {"kv_after_update": "keep"}},
    "caches kept, filtered, streamed, all weighted": {
        "overlap": {"kv_after_update": "keep", "intra_step": "per_chunk"},
        "rollout": {"top_p": 0.97, "temperature": 1.5},
        "ppo": {"tis": "all"},
    },
    "filtered, one pass": {"rollout": {"top_p": 0.97, "temperature": 1.5}},
}
QUICK = (
    "stale tokens weighted", "none weighted", "responses rejected, KL in the loss",
    "caches kept, filtered, streamed, all weighted",
)  # fmt: skip
CRITIC_FREE = {"models": {"critic": "actor"}, "ppo": {"critic_learning_rate": 1e-5, "batch_size": 4, "group_size": 3}}
GROUPS: dict[str, dict[str, Any]] = {
    "GRPO, KL in the loss": {
        "ppo": {
            "algorithm": "grpo", "loss_aggregation": "sequence_mean",
            "kl": {"placement": "loss", "estimator": "k3+", "coefficient": 0.1},
        },
    },
    "GRPO in mini-batches, KL in the reward": {
        "ppo": {"algorithm": "grpo", "epochs": 2, "mini_batches": 2, "clip_range": 0.02, "kl": {"coefficient": 0.1}},
    },
    "Dr. GRPO": {
        "ppo": {
            "algorithm": "grpo", "normalize_advantages_by_std": False, "loss_aggregation": "token_sum",
            "missing_eos_penalty": 0.4,
        },
    },
    "RLOO, groups of equal scores replaced": {
        "ppo": {"algorithm": "rloo", "score_scale": 1000.0, "score_clip": 0.5, "dynamic_sampling": 3},
    },
    "RLOO": {"ppo": {"algorithm": "rloo", "kl": {"coefficient": 0.1, "controller": "adaptive", "target": 0.01, "horizon": 40}}},
}  # fmt: skip
FIELDS = {
    "raw_scores": "raw", "scores": "scores", "rewards": "rewards",
    "advantages": "advantages", "returns": "returns", "values": "values",
    "proximal_logp": "proximal", "reference_logp": "reference", "kl": "kl", "weights": "weights",
}  # fmt: skip


def oracle_for(world: Any, spec: Any) -> Oracle:
    actor = dict(world.first_weights(spec, "actor"))
    critic = dict(world.first_weights(spec, "critic")) if spec.ppo.has_critic else None
    reward = load_model(ModelSpec(path="reward"), "scalar", [world.folder], torch.float64, 0).state_dict()
    oracle = Oracle(spec, actor, critic, dict(reward), heads=2)
    rows = [json.loads(line)["text"] for line in (world.folder / "texts.jsonl").read_text().splitlines()]
    oracle.texts = [ids for ids in rows if len(ids) > 1]
    return oracle


def answers(step: Any) -> list[Answer]:
    return [
        Answer(
            s.sequence_id,
            s.prompt.tolist(),
            list(s.response),
            list(s.token_versions),
            s.ended_by_eos,
            left(s.support),
            s.kept_version,
        )
        for s in step.experience.sequences
    ]


def left(support: Any) -> list[list[int]]:
    """Support of each token as ids."""
    return [np.flatnonzero(row).tolist() for row in decode_support(support, VOCAB)]


def agree(step: Any, told: Any) -> None:
    lengths = step.experience.mask.sum(-1).tolist()
    critic = () if told.values else ("returns", "values")
    for name, attribute in ((name, attribute) for name, attribute in FIELDS.items() if name not in critic):
        ours, wanted = getattr(step.experience, name), getattr(told, attribute)
        one_each = ours.dim() == 1
        rows = ours.tolist() if one_each else [row[:n].tolist() for row, n in zip(ours, lengths, strict=True)]
        flat = rows if one_each else [x for row in rows for x in row]
        expected = wanted if one_each else [x for row in wanted for x in row]
        assert flat == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), name
    for name, value in told.metrics.items():
        assert step.metrics[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name


def same_average(run: Any, oracle: Oracle) -> None:
    folder = sorted((run.out / "checkpoints").glob("step-*"))[-1] / "actor-ema"
    assert folder.exists() == (oracle.ppo.ema_decay is not None)
    if folder.exists():
        for name, weight in load_file(folder / "model.safetensors").items():
            torch.testing.assert_close(weight, oracle.average[name], rtol=0, atol=TOLERANCE)
            assert not torch.equal(weight, run.weights("actor")[name])


def same_weights(run: Any, oracle: Oracle, world: Any) -> None:
    for role, wanted in [("actor", oracle.history[-1])] + [("critic", oracle.critic)] * bool(oracle.critic):
        ours, first = run.weights(role), world.first_weights(oracle.spec, role)
        for name, weight in wanted.items():
            torch.testing.assert_close(ours[name], weight, rtol=0, atol=TOLERANCE, msg=lambda m, n=f"{role} {name}": f"{n}: {m}")
        assert max(float((ours[name] - first[name]).abs().max()) for name in first) > 1e-3, f"the {role} did not move"


def check_sampling(oracle: Oracle, batch: list[Answer], behaviour: list[list[float]], eos: int, longest: int) -> None:
    """Each token is the one that (seed, sequence_id, position) draws under the weights of its version, until the end."""
    for answer, recorded in zip(batch, behaviour, strict=True):
        assert recorded == pytest.approx(oracle.behaviour(answer), abs=TOLERANCE)
        with torch.no_grad():
            tables = oracle.sampled_from(answer)
        for t in {0, 1, len(answer.response) // 2, len(answer.response) - 1} & set(range(len(answer.response))):
            token, _ = oracle.draw(tables[t], answer.sequence_id, t)
            if answer.support:
                assert answer.support[t] == sorted(left_by(oracle.spec.rollout, tables[t].tolist()))
            assert token == answer.response[t]
        assert eos not in answer.response[:-1]
        assert answer.ended_by_eos == (answer.response[-1] == eos)
        assert answer.ended_by_eos or len(answer.response) == longest


@pytest.mark.parametrize("name", OFF)
def test_sequential_ppo_equals_the_oracle(world: Any, tmp_path: Any, name: str) -> None:
    spec = world.spec(SMALL, {"overlap": {"intra_step": "off", "inter_step": "off"}}, OFF[name])
    assert replay(world, spec, world.run(spec, tmp_path)) == STEPS


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in DEFER])
def test_a_deferring_run_replayed_by_the_oracle(world: Any, tmp_path: Any, name: str) -> None:
    spec = world.spec(SMALL, {"seed": 4, "rollout": {"max_new_tokens": 84}, "overlap": {"intra_step": "off"}}, DEFER[name])
    run = world.run(spec, tmp_path, inline=spec.overlap.intra_step == "per_chunk")
    assert replay(world, spec, run) == STEPS
    ages = [s.age for step in run.steps for s in step.experience.sequences]
    assert max(ages) == 2, "no sequence was deferred twice"
    weights = torch.cat([step.experience.weights[step.experience.mask] for step in run.steps])
    assert (float((weights - 1).abs().max()) > 0.01) == (spec.ppo.tis != "off")
    assert float(weights.max()) <= spec.ppo.tis_cap
    assert (float(weights.min()) == 0) == (spec.ppo.tis_outside != "clamp")


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("inter", ["off", "defer", "tail_batch"])
def test_critic_free_training_equals_the_oracle(world: Any, tmp_path: Any, name: str, inter: str) -> None:
    overlap = {"overlap": {"inter_step": inter, "intra_step": "off" if inter == "off" else "per_chunk"}}
    if inter == "tail_batch" and "dynamic_sampling" in GROUPS[name]["ppo"]:
        pytest.skip("tail batching and dynamic sampling exclude each other")
    spec = world.spec(SMALL, CRITIC_FREE, overlap, GROUPS[name])
    run = world.run(spec, tmp_path, inline=inter != "off")
    assert replay(world, spec, run) == STEPS
    ages = [s.age for step in run.steps for s in step.experience.sequences]
    assert (max(ages) > 0) == (inter == "defer")
    assert not list(tmp_path.rglob("critic*")), "a critic was saved"


def replay(world: Any, spec: Any, run: Any) -> int:
    """Train the oracle on the run's answers step by step and compare every result; returns the steps."""
    oracle = oracle_for(world, spec)
    for version, step in enumerate(run.steps):
        batch = answers(step)
        check_sampling(oracle, batch, [s.behaviour_logprobs for s in step.experience.sequences], 2, spec.rollout.max_new_tokens)
        late = spec.ppo.dynamic_sampling > 0  # a replacement may have no token when its first step ends
        assert all(s.age - version + s.token_versions[0] in ((0, 1) if late else (0,)) for s in step.experience.sequences)
        assert all(s.age == version - s.cohort for s in step.experience.sequences) or spec.overlap.inter_step == "tail_batch"
        kept = spec.overlap.kv_after_update == "keep"
        assert all((s.kept_version is not None) == kept for s in step.experience.sequences)
        stale = [[v < version or (kept and s.cohort < version) for v in s.token_versions] for s in step.experience.sequences]
        mask = step.experience.mask
        assert [row[m].tolist() for row, m in zip(step.experience.stale, mask, strict=True)] == stale
        assert step.kl_coefficient == pytest.approx(oracle.kl_coefficient, rel=TOLERANCE)
        agree(step, oracle.step(batch))
    same_weights(run, oracle, world)
    same_average(run, oracle)
    return len(run.steps)

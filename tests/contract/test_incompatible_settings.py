"""Settings that cannot be combined are rejected with the valid choices."""

from __future__ import annotations

from typing import Any

import pytest

from oppo_contract import load_spec
from oppo_contract.spec import load_stored_spec
from tests.contract.test_bad_input import change, refused

INEXACT = [
    ("ppo.epochs", 2), ("ppo.mini_batches", 2), ("ppo.loss_aggregation", "token_sum"), ("ppo.whiten_rewards", True),
    ("ppo.normalize_scores", "running"),
    ("ppo.on_nonfinite", "skip"), ("overlap.intra_step", "off"),
    ("resources.dtype", "bfloat16"), ("resources.kind", "cuda"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), INEXACT)
def test_update_overlap_conflicts(minimal: dict[str, Any], path: str, value: Any) -> None:
    (problem,) = refused(change(change(minimal, "overlap.update_overlap", True), path, value))
    assert (problem.path, problem.message) == (path, "cannot be combined with overlap.update_overlap")
    assert problem.allowed
    load_spec(change(minimal, path, value))


SHARDED = [
    ("ppo.on_nonfinite", "skip"), ("ppo.ema_decay", 0.9), ("resources.dtype", "float64"),
    ("overlap.update_overlap", True),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize(("path", "value"), SHARDED)
def test_sharded_backend_conflicts(minimal: dict[str, Any], path: str, value: Any, backend: str) -> None:
    sharded = change(change(minimal, "training.backend", backend), path, value)
    if (backend, value) == ("fsdp2", "float64"):  # DeepSpeed alone steps on float32 weights
        load_spec(sharded)
        return
    (problem,) = refused(sharded)
    assert (problem.path, problem.message) == (path, f"cannot be combined with training.backend {backend}")
    assert problem.allowed
    load_spec(change(minimal, path, value))
    load_spec(change(change(minimal, "training.backend", backend), "resources.dtype", "bfloat16"))


def test_recompute_conflicts(minimal: dict[str, Any]) -> None:
    together = change(change(minimal, "training.recompute", "selective"), "overlap.update_overlap", True)
    (twice,) = refused(together)
    assert (twice.path, twice.message) == ("training.recompute", "cannot be combined with overlap.update_overlap")
    for recompute in ("head", "full"):
        load_spec(change(together, "training.recompute", recompute))
        load_spec(change(change(minimal, "training.backend", "deepspeed"), "training.recompute", recompute))


def test_kl_estimator_must_suit_its_placement(minimal: dict[str, Any]) -> None:
    (problem,) = refused(change(minimal, "ppo.kl.placement", "loss"))
    assert (problem.path, problem.value) == ("ppo.kl.estimator", '"k1"')
    assert "expected gradient of zero" in problem.message
    assert "k2, k3 or k3+" in str(problem.allowed)
    (problem,) = refused(change(minimal, "ppo.kl.estimator", "k3+"))
    assert problem.path == "ppo.kl.estimator"
    for estimator in ("k2", "k3", "k3+"):
        load_spec(change(minimal, "ppo.kl", {"placement": "loss", "estimator": estimator}))


def test_a_stored_run_with_k1_in_the_loss_can_be_read(minimal: dict[str, Any]) -> None:
    """Its page and a fork with another estimator need that; a new run and a resumed one are refused."""
    assert load_stored_spec(change(minimal, "ppo.kl.placement", "loss")).ppo.kl.estimator == "k1"


def test_all_tokens_are_weighted_by_default_where_sampler_and_trainer_round_differently(minimal: dict[str, Any]) -> None:
    bfloat16 = change(minimal, "resources.dtype", "bfloat16")
    assert load_spec(minimal).ppo.tis == "stale"
    assert load_spec(bfloat16).ppo.tis == "all"
    assert load_spec(change(bfloat16, "ppo.tis", "stale")).ppo.tis == "stale"
    assert load_spec(change(change(minimal, "models.actor", {"path": "a"}), "rollout.backend", "vllm")).ppo.tis == "all"


WITHOUT_VLLM = [
    ("resources.dtype", "float64"), ("ppo.tis", "stale"), ("models.actor", {"tiny": {"context": 1024}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), WITHOUT_VLLM)
def test_vllm_conflicts(minimal: dict[str, Any], path: str, value: Any) -> None:
    decoded = change(change(change(minimal, "models.actor", {"path": "a"}), "rollout.backend", "vllm"), "ppo.tis", "all")
    load_spec(decoded)
    (problem,) = refused(change(decoded, path, value))
    assert (problem.path, problem.message) == (path, "cannot be combined with rollout.backend vllm")
    assert problem.allowed
    load_spec(change(minimal, path, value))


SERVED = {"models.reward": {"model": {"path": "a"}, "served_by": "vllm"}}


@pytest.mark.parametrize(
    ("changes", "path", "allowed"),
    [
        ({"models.reward": {"rule": "a:b", "served_by": "vllm"}}, "models.reward.served_by", "a model with a path"),
        ({"models.reward": {"model": {"tiny": {}}, "served_by": "vllm"}}, "models.reward.served_by", "a model with a path"),
        ({"models.reward.reads": "text"}, "models.reward.served_by", "reads: tokens"),
        ({"models.reward": {"parts": [{"rule": "a:b"}], "served_by": "vllm"}}, "models.reward.served_by", "a model with a path"),
        (
            {"models.reward": {"parts": [{"rule": "a:b"}, {"model": {"path": "a"}, "memory_share": 0.5}]}},
            "models.reward.parts.1.memory_share", "served_by vllm",
        ),
        ({"models.reward": {"rule": "a:b", "memory_share": 0.5}}, "models.reward.memory_share", "served_by vllm"),
        ({"resources.dtype": "float64"}, "resources.dtype", "bfloat16"),
    ],
)  # fmt: skip
def test_vllm_reward_conflicts(minimal: dict[str, Any], changes: dict[str, Any], path: str, allowed: str) -> None:
    spec = load_spec(changed_by(minimal, SERVED))
    assert [(s.served_by, s.memory_share) for s in spec.models.reward.sources()] == [("vllm", 0.15)]
    (problem,) = refused(changed_by(minimal, SERVED | changes))
    assert problem.path == path
    assert allowed in (problem.allowed or "")


# Four GPUs per node, three for vLLM in a separate process.
SEPARATE_VLLM = {
    "models.actor": {"path": "a"}, "rollout.backend": "vllm", "ppo.tis": "all",
    "resources.devices": 4, "resources.decoding_devices": 3,
}  # fmt: skip


def changed_by(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for where, new in changes.items():
        data = change(data, where, new)
    return data


@pytest.mark.parametrize(
    ("changes", "path", "allowed"),
    [
        ({"resources.decoding_devices": 4}, "resources.decoding_devices", "at most 3"),
        ({"resources.devices": 5}, "resources.decoding_devices", "a multiple of 2"),
        ({"rollout.vllm_sleep": True}, "rollout.vllm_sleep", "false"),
        ({"rollout.backend": "torch"}, "resources.decoding_devices", "rollout.backend vllm"),
    ],
)
def test_decoding_device_conflicts(minimal: dict[str, Any], changes: dict[str, Any], path: str, allowed: str) -> None:
    spec = load_spec(changed_by(minimal, SEPARATE_VLLM))
    assert (spec.resources.ranks_per_node, spec.resources.ranks) == (1, 1)
    (problem,) = refused(changed_by(minimal, SEPARATE_VLLM | changes))
    assert problem.path == path
    assert allowed in (problem.allowed or "")


# Six GPUs a node: two train, two score, and vLLM decodes on two.
WITH_SCORING_DEVICES = SEPARATE_VLLM | {"resources.devices": 6, "resources.decoding_devices": 2, "resources.scoring_devices": 2}


@pytest.mark.parametrize(
    ("changes", "path", "allowed"),
    [
        ({"resources.scoring_devices": 1}, "resources.scoring_devices", "0 or 2"),
        ({"resources.scoring_devices": 4}, "resources.scoring_devices", "0 or 2"),
        ({"resources.devices": 7}, "resources.scoring_devices", "an even number of devices"),
        ({"resources.decoding_devices": 6}, "resources.decoding_devices", "at most 5"),
        ({"resources.processes": 6}, "resources.processes", "2, or empty"),
        ({"training.backend": "deepspeed"}, "training.backend", "plain"),
        ({"resources.kind": "cpu"}, "resources.devices", "resources.processes divides a node's cores"),
    ],
)
def test_scoring_device_conflicts(minimal: dict[str, Any], changes: dict[str, Any], path: str, allowed: str) -> None:
    spec = load_spec(changed_by(minimal, WITH_SCORING_DEVICES))
    assert (spec.resources.ranks_per_node, spec.resources.ranks) == (2, 2)
    (problem,) = refused(changed_by(minimal, WITH_SCORING_DEVICES | changes))
    assert problem.path == path
    assert allowed in (problem.allowed or "")


def test_a_cpu_has_no_second_device_for_scorers(minimal: dict[str, Any]) -> None:
    devices = {"resources.kind": "cpu", "resources.devices": 2, "resources.scoring_devices": 1}
    (problem,) = refused(changed_by(minimal, devices))
    assert (problem.path, problem.message) == (
        "resources.devices",
        "is more than one cpu device per node; a cpu device is the whole node",
    )


def test_separate_vllm_process_with_deepspeed_is_valid(minimal: dict[str, Any]) -> None:
    load_spec(changed_by(minimal, SEPARATE_VLLM | {"training.backend": "deepspeed"}))


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
def test_sharded_ranks_need_separate_gpus_for_vllm(minimal: dict[str, Any], backend: str) -> None:
    """With CUDA IPC, a rank whose vLLM has died would block the others."""
    on_our_gpus = SEPARATE_VLLM | {"training.backend": backend, "resources.devices": 2, "resources.decoding_devices": 0}
    (problem,) = refused(changed_by(minimal, on_our_gpus))
    assert (problem.path, problem.message) == ("training.backend", "cannot be combined with rollout.backend vllm")
    assert problem.allowed.startswith("plain, or separate GPUs for vLLM (resources.decoding_devices)")
    apart = {"resources.devices": 4, "resources.decoding_devices": 2}
    for instead in ({"training.backend": "plain"}, apart, {"resources.devices": 1}):
        load_spec(changed_by(minimal, on_our_gpus | instead))


def test_vllm_sleep_conflicts_with_a_kept_cache(minimal: dict[str, Any]) -> None:
    decoded = change(change(change(minimal, "models.actor", {"path": "a"}), "rollout.backend", "vllm"), "ppo.tis", "all")
    sleeping = change(decoded, "rollout.vllm_sleep", True)
    (problem,) = refused(change(sleeping, "overlap.kv_after_update", "keep"))
    assert problem.path == "rollout.vllm_sleep"
    load_spec(change(decoded, "overlap.kv_after_update", "keep"))
    load_spec(sleeping)


def test_vllm_sampling_mask_needs_top_k(minimal: dict[str, Any]) -> None:
    decoded = change(change(change(minimal, "models.actor", {"path": "a"}), "rollout.backend", "vllm"), "ppo.tis", "all")
    filtered = change(decoded, "rollout.top_p", 0.9)
    (problem,) = refused(filtered)
    assert problem.path == "rollout.top_k"
    load_spec(change(filtered, "rollout.top_k", 50))


@pytest.mark.parametrize(("path", "value"), [("rollout.vllm_sleep", True), ("rollout.top_k", 20)])
def test_vllm_on_a_cpu_has_no_sleep_and_no_filters(minimal: dict[str, Any], path: str, value: Any) -> None:
    decoded = change(change(minimal, "models.actor", {"path": "a"}), "rollout.backend", "vllm")
    (problem,) = refused(change(change(decoded, path, value), "resources.kind", "cpu"))
    assert (problem.path, problem.message) == (path, "cannot be combined with rollout.backend vllm")
    load_spec(change(decoded, "resources.kind", "cpu"))
    load_spec(change(change(decoded, path, value), "resources.kind", "cuda"))


def test_device_kind_is_narrowed_by_other_settings(minimal: dict[str, Any]) -> None:
    """A run with kind `any` must not get a device on which its engine would not start."""
    assert load_spec(minimal).device_kind == "any"
    assert load_spec(change(minimal, "resources.kind", "cuda")).device_kind == "cuda"
    assert load_spec(change(minimal, "overlap.update_overlap", True)).device_kind == "cpu"
    sharded = change(minimal, "training.backend", "deepspeed")
    assert load_spec(sharded).device_kind == "cpu"
    assert load_spec(change(sharded, "overlap.intra_step", "off")).device_kind == "any"
    assert load_spec(change(minimal, "training.backend", "fsdp2")).device_kind == "any"
    assert load_spec(change(change(minimal, "rollout.backend", "vllm"), "ppo.tis", "all")).device_kind == "cuda"

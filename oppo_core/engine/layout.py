"""Device layout: which roles run on which device. A CPU device is a core. On a GPU all roles share one device with a CUDA stream
for the actor and one for the scorers, or the scorers have another GPU (`resources.scoring_devices`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from oppo_contract.events import Role
from oppo_contract.spec import RunSpec
from oppo_core.distributed.process_group import Ranks

# Below this hidden size, decode operations are too small for a second thread (measured: docs/measurements/2026-11-27.md).
DECODE_THREADS_FROM_HIDDEN = 128


class LayoutError(ValueError):
    """The machine lacks a device that the spec requires, or settings are incompatible with its devices."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Devices of the actor and of the scorers. `streams`: the scorers read while the actor decodes.

    `idle_in_training`: cores of the scorers that are idle while the actor is trained, because there is no critic.
    """

    devices: list[str]
    actor_devices: tuple[str, ...]
    scorer_devices: tuple[str, ...]
    decode_threads: int
    streams: bool
    scorers: tuple[Role, ...] = ("reward", "reference", "critic")
    idle_in_training: tuple[str, ...] = ()

    @property
    def apart(self) -> bool:
        """Whether actor and scorers have no common device."""
        return not set(self.actor_devices) & set(self.scorer_devices)

    def cores(self, count: int) -> tuple[str, ...]:
        """The first `count` of the devices on which the actor is trained; its own come first."""
        return self.training_devices[:count]

    @property
    def training_devices(self) -> tuple[str, ...]:
        """Devices on which the actor is trained."""
        return self.actor_devices + self.idle_in_training

    def lanes(self) -> list[tuple[str, Role]]:
        """(device, role) pairs in the order of the timeline's rows."""
        actor: list[tuple[str, Role]] = [(device, "actor") for device in self.actor_devices]
        return actor + [(device, role) for device in self.scorer_devices for role in self.scorers]


def scorer_roles(spec: RunSpec) -> tuple[Role, ...]:
    """Roles that score responses."""
    return ("reward", "reference", "critic") if spec.ppo.has_critic else ("reward", "reference")


def select_device(spec: RunSpec) -> torch.device:
    """The device of this rank's actor.

    Raises:
        LayoutError: too few GPUs, or a setting that does not work on GPUs.
    """
    available = torch.cuda.is_available()
    if spec.resources.kind == "cuda" and not available:
        raise LayoutError("resources.kind is cuda, but torch sees no GPU here; choose cpu, or another node")
    if spec.resources.kind == "cpu":
        return torch.device("cpu")
    if spec.rollout.backend == "vllm" and not available:
        _check_vllm_on_cpu(spec)
    required, present = spec.resources.devices // spec.resources.nodes, torch.cuda.device_count() if available else 0
    if required > max(1, present):
        hint = " (without GPUs a machine is one device; resources.processes splits its cores with kind cpu)"
        raise LayoutError(
            f"resources.devices gives each node {required} devices, but torch sees {present or 'no'} GPUs here; use at most that"
            f" many{'' if available else hint}"
        )
    if not available:
        return torch.device("cpu")
    if spec.overlap.update_overlap:
        raise LayoutError("overlap.update_overlap trains in two processes on CPUs; on a GPU switch it off")
    if spec.training.backend == "deepspeed" and spec.overlap.intra_step != "off":
        raise LayoutError(
            "training.backend deepspeed on a GPU: the actor's and the critic's thread would run collectives in an undefined"
            " order; set overlap.intra_step to off, or training.backend to fsdp2 or plain"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def _check_vllm_on_cpu(spec: RunSpec) -> None:
    """Raise LayoutError for what vLLM needs a GPU for; the spec refuses it with resources.kind cpu."""
    remedy = "choose resources.kind cuda, where a machine has GPUs, or rollout.backend torch"
    if spec.rollout.has_sampling_mask:
        raise LayoutError(f"torch sees no GPU here, and on a CPU vLLM reports no mask of top-k, top-p and min-p; {remedy}")
    if spec.rollout.vllm_sleep:
        raise LayoutError(f"torch sees no GPU here, and on a CPU vLLM cannot release memory (rollout.vllm_sleep); {remedy}")


def require_equal_devices(device: torch.device, ranks: Ranks) -> None:
    """Raise LayoutError on all ranks if their devices differ: a rank without a GPU would wait for NCCL for ever. Collective."""
    names = [name.decode() for name in ranks.all_gather(_device_name(device).encode())]
    if len(set(names)) > 1:
        listed = ", ".join(f"rank {rank} has {name}" for rank, name in enumerate(names))
        raise LayoutError(
            f"the ranks of a run need equal devices, but {listed}; submit it to a queue whose nodes are of one kind, or set"
            " resources.kind to the kind that all of them have"
        )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"


def scoring_device(spec: RunSpec, device: torch.device) -> torch.device:
    """The scorers' device: with `resources.scoring_devices` a GPU after those of the node's ranks, else the actor's `device`."""
    if device.type != "cuda" or not spec.resources.scoring_devices:
        return device
    return torch.device("cuda", (device.index or 0) + spec.resources.ranks_per_node)


def build_layout(spec: RunSpec, device: torch.device, threads: int, hidden: int, name: Callable[[str], str] = str) -> Layout:
    """Assign the GPUs, or `threads` cores, to the actor and the scorers. `name` returns the run-wide name of a node's device.

    In sequential PPO and with sharded weights one process uses all cores. With streaming the scorers get half of them in their
    own process; if there is no critic, the actor is trained on all cores; with a single core they run in the actor's process
    without streaming.
    """
    streams = spec.overlap.intra_step != "off" and (not spec.training.shards_weights or spec.models.reward.is_remote)
    if device.type == "cuda":
        gpus = [name(str(gpu)) for gpu in (device, scoring_device(spec, device))]
        return Layout(list(dict.fromkeys(gpus)), (gpus[0],), (gpus[1],), threads, streams, scorer_roles(spec))
    devices = [name(f"cpu:{core}") for core in range(threads)]
    all_cores = tuple(devices)
    if spec.overlap.intra_step == "off" or spec.training.shards_weights:
        decode_threads = threads if hidden >= DECODE_THREADS_FROM_HIDDEN else 1
        return Layout(devices, all_cores, all_cores, decode_threads, streams, scorer_roles(spec))
    split = max(1, threads - threads // 2)
    scorers, idle = all_cores[split:] or all_cores[:1], () if spec.ppo.has_critic else all_cores[split:]
    return Layout(devices, all_cores[:split], scorers, split, scorers != all_cores[:split], scorer_roles(spec), idle)

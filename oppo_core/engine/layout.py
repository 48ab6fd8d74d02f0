"""Who works on which device. On a CPU a device is a core. On a GPU all four roles share one, each side on a stream of its own; or
the scorers have another one (`resources.scoring_devices`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from oppo_contract.events import Role
from oppo_contract.spec import RunSpec

# Below this width a decode step's operations are too small to be worth a second thread (measured: docs/performance.md).
DECODE_THREADS_FROM_HIDDEN = 128
OWN_NUMBER = "LOCAL_RANK"  # torchrun tells each process which of its node's it is


class LayoutError(ValueError):
    """The machine does not have what the spec asks for."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which devices do what. `remote`: the scorers work beside the actor, in a process or a thread of their own."""

    devices: list[str]
    actor_devices: tuple[str, ...]
    scorer_devices: tuple[str, ...]
    decode_threads: int
    remote: bool
    scorers: tuple[Role, ...] = ("reward", "reference", "critic")

    @property
    def apart(self) -> bool:
        """Whether actor and scorers share no device."""
        return not set(self.actor_devices) & set(self.scorer_devices)

    def cores(self, count: int) -> tuple[str, ...]:
        """The devices that the actor's work on `count` cores occupies."""
        return self.actor_devices[:count]

    def lanes(self) -> list[tuple[str, Role]]:
        """(device, role) pairs in drawing order."""
        actor: list[tuple[str, Role]] = [(device, "actor") for device in self.actor_devices]
        return actor + [(device, role) for device in self.scorer_devices for role in self.scorers]


def scorers_of(spec: RunSpec) -> tuple[Role, ...]:
    """Who reads the answers."""
    return ("reward", "reference", "critic") if spec.ppo.has_critic else ("reward", "reference")


def device_of(spec: RunSpec) -> torch.device:
    """Where the run's tensors live.

    Raises:
        LayoutError: the spec wants a GPU a rank and they are not there, or a switch that works on CPUs only.
    """
    found = torch.cuda.is_available()
    if spec.resources.kind == "cuda" and not found:
        raise LayoutError("resources.kind is cuda, but torch sees no GPU here; choose cpu, or another node")
    if spec.resources.kind == "cpu":
        return torch.device("cpu")
    wanted = spec.resources.devices // spec.resources.nodes
    if wanted > max(1, torch.cuda.device_count() if found else 0):
        raise LayoutError(_too_few_gpus(wanted, found))
    if not found:
        return torch.device("cpu")
    if spec.overlap.update_overlap:
        raise LayoutError("overlap.update_overlap trains in two processes on CPUs; on a GPU switch it off")
    if spec.training.backend != "plain" and spec.overlap.intra_step != "off":
        raise LayoutError(
            f"training.backend {spec.training.backend} on a GPU: two threads of a process would meet the other ranks for actor"
            " and critic, in no certain order; set overlap.intra_step to off, or training.backend to plain"
        )
    return torch.device("cuda", int(os.environ.get(OWN_NUMBER, torch.cuda.current_device())))


def scoring_device(spec: RunSpec, device: torch.device) -> torch.device:
    """Where the scorers' tensors live: on a GPU of their own behind those on which the node's ranks train, or with the actor's.

    Args:
        device: the actor's.
    """
    if device.type != "cuda" or not spec.resources.scoring_devices:
        return device
    return torch.device("cuda", (device.index or 0) + spec.resources.ranks_per_node)


def take_device(device: torch.device) -> None:
    """What is done on "the GPU" from now on is done on this one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _too_few_gpus(wanted: int, found: bool) -> str:
    there = f"sees {torch.cuda.device_count()} GPUs" if found else "sees no GPU"
    return f"resources.devices gives each node {wanted} devices, but torch {there} here; take as many as there are" + (
        "" if found else " (a machine without GPUs is one device, whose cores resources.processes shares out with kind cpu)"
    )


def lay_out(spec: RunSpec, device: torch.device, threads: int, hidden: int, named: Callable[[str], str] = str) -> Layout:
    """Give the GPUs, or `threads` cores, to the actor and the scorers. `named`: the run's name for a device of this node.

    In sequential PPO one process has all cores; streaming gives the scorers a process and cores. With one core they run in the
    actor's process, and nothing is streamed.
    """
    if device.type == "cuda":
        one, other = ((named(str(place)),) for place in (device, scoring_device(spec, device)))
        return Layout(list(dict.fromkeys(one + other)), one, other, threads, spec.overlap.intra_step != "off", scorers_of(spec))
    devices = [named(f"cpu:{core}") for core in range(threads)]
    everything = tuple(devices)
    if spec.overlap.intra_step == "off":
        decoding = threads if hidden >= DECODE_THREADS_FROM_HIDDEN else 1
        return Layout(devices, everything, everything, decoding, False, scorers_of(spec))
    split = max(1, threads - threads // 2)
    scorers = everything[split:] or everything[:1]
    return Layout(devices, everything[:split], scorers, split, scorers != everything[:split], scorers_of(spec))

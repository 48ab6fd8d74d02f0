"""How much memory a run takes, worked out from the models' files and the spec before anything is loaded.

An estimate with its arithmetic shown, not a promise: activations depend on the kernels. Sizes in bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oppo_contract.spec import ModelSpec, RunSpec, TinyArchitecture
from oppo_core.models.activation_checkpointing import HEAD_SLICE
from oppo_core.models.errors import ModelFolderError
from oppo_core.models.model_io import TINY, find, read_config
from oppo_core.models.tiny_transformer import Head, TinyTransformer
from oppo_core.vllm.weight_transfer import pack_bytes

DTYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}
TOKEN_BYTES = 8
# Kept for the backward pass, numbers a token, layer and unit of width: inputs and outputs of attention and feed-forward part, or
# what `training.recompute` leaves of them. Counted (oppo_bench.engine.live_bytes): 32, 16 and 1 in the shapes of Qwen 2.5.
ACTIVATIONS_A_UNIT = {"off": 34, "head": 34, "selective": 17, "full": 1}
# Numbers a token and unit of width while one block is computed again, and its gradients are.
BLOCK_AGAIN = {"selective": 30, "full": 44}
# Logits, their log-softmax and its gradient, a token and word; as much again where the entropy has a gradient. Counted likewise.
LOGITS_A_WORD = 3
# A round of sampling holds, a row and word: tempered logits, log-probs and probabilities, and their sum so far in float64.
SAMPLED_A_WORD = 3
# Kernels that libraries load on first use, their workspaces, and memory in pieces too small to use: assumed, not measured.
GPU_RESERVE = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's files tell: weights, layers, width, words, longest sequence, and numbers cached a token."""

    weights: int
    layers: int
    width: int
    vocab: int
    context: int
    cached: int


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that takes memory, and how its size was worked out."""

    name: str
    size: int
    arithmetic: str


def shape_of(model: ModelSpec, head: Head, roots: list[Path]) -> Shape | None:
    """A model's shape; None for one whose files do not tell, or that is not on this disk but may be on the hub.

    Raises:
        ModelFolderError: no such folder, or its config or weights cannot be read.
    """
    if model.tiny is not None:
        return _tiny(model.tiny, head)
    assert model.path is not None
    try:
        folder = find(model.path, roots)
    except ModelFolderError:
        if model.path.count("/") == 1 and not model.path.startswith((".", "/")):
            return None
        raise
    config = read_config(folder)
    if config.get("model_type") == TINY:
        return _tiny(TinyArchitecture.model_validate(config["architecture"]), head)
    try:
        return _hugging(folder)
    except AttributeError:
        return None  # its config names sizes otherwise; they are known once it is loaded


def _tiny(architecture: TinyArchitecture, head: Head) -> Shape:
    with torch.device("meta"):
        network = TinyTransformer(architecture, head)
    weights = sum(p.numel() for p in network.parameters())
    a = architecture
    return Shape(weights, a.layers, a.hidden, a.vocab, a.context, network.cache_shape.numbers)


def _hugging(folder: Path) -> Shape:
    from transformers import AutoConfig  # takes seconds to import

    try:
        config: Any = AutoConfig.from_pretrained(str(folder), trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{folder} cannot be loaded: {error}") from None
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * heads * width
    return Shape(
        _counted(folder), config.num_hidden_layers, config.hidden_size, config.vocab_size, config.max_position_embeddings, cached
    )


def _counted(folder: Path) -> int:
    """Numbers in a folder's safetensors files, from their headers."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFolderError(f"{folder} has no safetensors; other weight files are never opened")
    count = 0
    for file in files:
        with file.open("rb") as content:
            header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for edge in tensor["shape"]:
                    size *= edge
                count += size
    return count


@dataclass(frozen=True, slots=True)
class Role:
    """A model at work: on how many numbers it is trained, whether it may keep keys and values of what it reads, and has weights.

    Not `own`: its weights are the actor's, counted there.
    """

    name: str
    shape: Shape
    trained: int = 0
    caches: bool = True
    own: bool = True


def memory_of(spec: RunSpec, roles: list[Role], slots: int, text_tokens: int = 0, gpu: int = 0) -> list[Item]:
    """Everything that a run keeps in a device's memory at once, the largest first.

    Args:
        roles: the models at work there, the actor first where it is one of them.
        slots: sequences that may be in flight.
        text_tokens: of the texts that are mixed in.
        gpu: bytes of memory that the device has in all; 0 for a CPU.
    """
    each = DTYPE_BYTES[spec.resources.dtype]
    columns = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    items = [item for role in roles for item in _of_role(spec, role, slots, columns, gpu)]
    passing = [_passing(role, spec, each, bool(gpu)) for role in roles if role.trained]
    for actor in (role for role in roles if role.name == "actor"):
        if spec.rollout.backend == "vllm":
            items += _vllm(spec, gpu, actor.shape.vocab * actor.shape.width * each, passing)
        else:
            items += [_cache("actor: keys and values", actor.shape, slots, columns, each), _sampling(actor.shape, slots, each)]
        items += _asked_for(spec, actor, columns, text_tokens)
    if gpu:
        said = f"{GPU_RESERVE:,} B, assumed: kernels, workspaces, what lies in pieces"
        items.append(Item("the GPU's libraries", GPU_RESERVE, said))
    return sorted([*items, *passing], key=lambda item: -item.size)


def _of_role(spec: RunSpec, role: Role, slots: int, columns: int, gpu: int) -> Iterator[Item]:
    """What a model at work keeps; the actor's cache is the decoder's."""
    shape, name, each = role.shape, role.name, DTYPE_BYTES[spec.resources.dtype]
    served = {f"reward {n}": s.memory_share for n, s in enumerate(spec.models.reward.sources(), 1) if s.served_by == "vllm"}
    if name in served:
        yield Item(f"{name}: vLLM", int(served[name] * gpu), f"{served[name]} of the GPU's {gpu:,} B (memory_share)")
        return
    if role.own:
        yield Item(f"{name}: weights", shape.weights * each, f"{shape.weights:,} × {each} B")
    if role.caches and name != "actor" and spec.overlap.intra_step == "per_chunk":  # else each answer is read at once, whole
        yield _cache(f"{name}: keys and values", shape, slots, columns, each)
    if role.trained:
        yield from _training_of(spec, role, each, bool(gpu))


def _asked_for(spec: RunSpec, actor: Role, columns: int, text_tokens: int) -> Iterator[Item]:
    """What only some runs ask for."""
    each = DTYPE_BYTES[spec.resources.dtype]
    if spec.ppo.ema_decay is not None:
        size = actor.trained * max(4, each)
        yield Item("actor: moving average", size, f"{actor.trained:,} × {max(4, each)} B (ppo.ema_decay)")
    if text_tokens:
        yield Item("texts that are mixed in", text_tokens * TOKEN_BYTES, f"{text_tokens:,} tokens × {TOKEN_BYTES} B")
    if spec.overlap.update_overlap:
        sums = 1 + spec.ppo.whiten_advantages + spec.ppo.is_regularized
        size = sums * actor.trained * each
        yield Item("actor: early gradients", size, f"{sums} × {actor.trained:,} × {each} B (update overlap)")
    if spec.evaluation is not None:
        ranks = spec.resources.ranks
        rows = min(math.ceil(spec.evaluation.count / ranks), spec.ppo.rows // ranks)
        yield _cache("evaluation: keys and values", actor.shape, rows, columns, each)


def _cache(name: str, shape: Shape, rows: int, columns: int, each: int) -> Item:
    return Item(name, rows * columns * shape.cached * each, f"{rows} rows × {columns} tokens × {shape.cached:,} × {each} B")


def _vllm(spec: RunSpec, gpu: int, largest: int, passing: list[Item]) -> list[Item]:
    """What vLLM takes of our GPU, and weights on their way to a process of its own, of which the largest takes so many bytes."""
    pack = pack_bytes(largest, spec.resources.decoding_devices)
    packs = Item("weights on their way to vLLM", 2 * pack, f"2 packs × {pack:,} B (rollout.vllm_process)")
    if spec.resources.decoding_devices:
        return [packs]
    return [_shared(spec, gpu, passing)] + ([packs] if spec.rollout.vllm_process == "own" else [])


def _shared(spec: RunSpec, gpu: int, passing: list[Item]) -> Item:
    """vLLM's part of a GPU; where it sleeps during the update, less what that makes in its place."""
    share = spec.rollout.vllm_memory_share
    size, said = int(share * gpu), f"{share} of the GPU's {gpu:,} B (rollout.vllm_memory_share)"
    if not spec.rollout.vllm_sleep:
        return Item("vLLM", size, said)
    made = sum(item.size for item in passing)
    said += f", less {made:,} B that the update holds for a while in its place (rollout.vllm_sleep)"
    return Item("vLLM", max(0, size - made), said)


def _sampling(shape: Shape, rows: int, each: int) -> Item:
    a_word = each + SAMPLED_A_WORD * max(4, each) + 8
    return Item("actor: sampling", rows * shape.vocab * a_word, f"{rows} rows × {shape.vocab:,} words × {a_word} B")


def _training_of(spec: RunSpec, role: Role, each: int, on_gpu: bool) -> list[Item]:
    """What training takes besides the weights that everybody sees, as its backend keeps it."""
    if spec.training.backend == "plain":
        return _training(spec, role, each)
    return _sharded(spec, role, each, on_gpu) if spec.training.backend == "deepspeed" else _fsdp(spec, role, each)


def _optimizer_bytes(each: int) -> int:
    """What the optimizer keeps of a number that takes `each` bytes: two moments, and of a short one its precise value."""
    return (8 if each <= 4 else 16) + (4 if each == 2 else 0)


def _training(spec: RunSpec, role: Role, each: int) -> list[Item]:
    """What training takes besides the weights."""
    kept, summed = _optimizer_bytes(each), max(4, each)
    return [
        Item(f"{role.name}: gradients", role.trained * summed, f"{role.trained:,} × {summed} B"),
        Item(f"{role.name}: optimizer", role.trained * kept, f"{role.trained:,} × {kept} B"),
    ]


def _sharded(spec: RunSpec, role: Role, each: int, on_gpu: bool) -> list[Item]:
    """What DeepSpeed keeps on a rank besides the weights: its part of what is cut up. It steps on float32 weights of its own."""
    ranks, stage, trained = spec.resources.ranks, spec.training.zero_stage, role.trained
    whole, part = f"{trained:,}", f"{trained:,} ÷ {ranks} ranks"
    cut = part if stage > 1 else whole
    items = [Item(f"{role.name}: gradients", trained * 4 // (ranks if stage > 1 else 1), f"{cut} × 4 B (ZeRO {stage})")]
    if not on_gpu or spec.training.offload == "off":
        items.append(Item(f"{role.name}: optimizer", trained * 12 // ranks, f"{part} × 12 B"))
    if stage == 3:
        weights = role.shape.weights
        items.append(Item(f"{role.name}: weights that are trained", weights * each // ranks, f"{weights:,} ÷ {ranks} × {each} B"))
    return items


def _fsdp(spec: RunSpec, role: Role, each: int) -> list[Item]:
    """What FSDP2 keeps on a rank besides the whole weights: its part of precise ones, of gradients and moments, and a block."""
    ranks, kept = spec.resources.ranks, max(4, each)
    weights, trained = role.shape.weights, role.trained
    block = weights * (each + kept) // max(1, role.shape.layers)
    return [
        Item(f"{role.name}: weights that are trained", weights * kept // ranks, f"{weights:,} ÷ {ranks} × {kept} B"),
        Item(f"{role.name}: gradients", trained * kept // ranks, f"{trained:,} ÷ {ranks} ranks × {kept} B"),
        Item(f"{role.name}: optimizer", trained * 2 * kept // ranks, f"{trained:,} ÷ {ranks} ranks × {2 * kept} B"),
        Item(f"{role.name}: a block made whole", block, f"{weights:,} ÷ {role.shape.layers} layers × ({each} + {kept}) B"),
    ]


def checkpoint_bytes(spec: RunSpec, roles: list[Role]) -> int:
    """About what one checkpoint takes on disk: trained weights and moments, and the actor as a whole folder."""
    each = DTYPE_BYTES[spec.resources.dtype]
    moments, actor = _optimizer_bytes(each), roles[0]
    # The moving average is written twice: as a folder of its own, and as precisely as it is kept.
    average = actor.shape.weights * each + actor.trained * max(4, each) if spec.ppo.ema_decay is not None else 0
    trained = sum(role.trained * (moments + (each if role is not actor else 0)) for role in roles)
    return actor.shape.weights * each + average + trained


def _passing(role: Role, spec: RunSpec, each: int, on_gpu: bool) -> Item:
    """What training holds for a while: a micro-batch's activations, or, when these are gone, what a step of AdamW makes.

    That is a root of every second moment, but for a GPU's fused kernel.
    """
    activations = _activations(role, spec, each)
    made = 0 if on_gpu else max(4, each)
    if role.trained * made <= activations.size:
        return activations
    said = f"{role.trained:,} × {made} B, more than the activations before it, {activations.arithmetic}"
    return Item(f"{role.name}: the optimizer's step", role.trained * made, said)


def _activations(role: Role, spec: RunSpec, each: int) -> Item:
    """What the largest pass holds. The logits are gone when the last block is computed again: the larger of the two counts."""
    shape, tokens, how = role.shape, spec.ppo.micro_batch_tokens, spec.training.recompute
    unit = ACTIVATIONS_A_UNIT[how]
    kept = tokens * shape.layers * shape.width * unit * each
    said = f"{tokens:,} tokens × {shape.layers} × {shape.width:,} × {unit} × {each} B"
    words = LOGITS_A_WORD * max(4, each) * (2 if spec.ppo.entropy_coefficient else 1)
    told = tokens if how == "off" else min(tokens, HEAD_SLICE)
    logits = told * shape.vocab * words if role.name == "actor" else 0
    again = tokens * shape.width * BLOCK_AGAIN.get(how, 0) * each
    if logits > again:
        said += f" + {told:,} × {shape.vocab:,} × {words} B"
    elif again:
        said += f" + {tokens:,} × {shape.width:,} × {BLOCK_AGAIN[how]} × {each} B"
    return Item(f"{role.name}: activations", kept + max(logits, again), said)

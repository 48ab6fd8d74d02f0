"""How much memory a run takes per device, computed from the shapes of its models and the spec before anything is loaded.

An estimate with its arithmetic shown; activations depend on the kernels. Sizes in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from oppo_contract.spec import RunSpec
from oppo_estimate.activations import Activations, block_bytes, norm_bytes
from oppo_estimate.items import Item, Role, dtype_bytes_of
from oppo_estimate.shapes import Shape
from oppo_estimate.sharded_memory import checkpoint_copies, largest_pass, sharded_items

TOKEN_BYTES = 8
# Hidden states whose logits exist at one time where activations are recomputed: 0.3 GB in float32 for a vocabulary of 152,000.
HEAD_SLICE = 512
# Weights on their way to vLLM in another process are sent in packs of about this size; two packs exist at a time.
PACK_BYTES = 1 << 28
# Logits, their log-softmax and its gradient, per token and vocabulary entry; twice that if the entropy has a gradient. Counted.
LOGITS_PER_ENTRY = 3
# A sampling round per row and vocabulary entry: tempered logits, log-probs and probabilities, and their float64 cumulative sum.
SAMPLED_PER_ENTRY = 3
# Held-out prompts decoded together even if a step has fewer rows, while they have few tokens: a decode step of 64 short rows
# takes little longer than one of 16.
EVALUATION_TOKENS = 32768
# The driver's context and loaded kernels (1.55 GB on an H100), and what CUDA graphs and the allocator hold beside the other
# items: there the driver counted 2.5 GB more than these (docs/measurements/2026-11-27.md).
GPU_RESERVE = 5 << 29
# Of activations on a CPU (docs/models.md, "How large a model may be"). glibc returns blocks of 32 MB and more at once; making it
# return smaller ones costs a fifth of the time, because the kernel clears every page again.
FREED_PERCENT = 40
# Networks below keep no copies of their weights for decoding on a CPU. Between two sizes that were measured: 2.6 MB are slower
# with copies, 14.7 MB as fast or faster (docs/measurements/2026-11-29.md).
LEAST_DECODE_COPY = 8 << 20


def memory_items(spec: RunSpec, roles: list[Role], slots: int, text_tokens: int = 0, gpu: int = 0) -> list[Item]:
    """Everything that a run holds in a device's memory at one time, the largest first.

    Args:
        roles: the models on the device, the actor first where it is one of them.
        slots: sequences that may be in flight.
        text_tokens: tokens of the pretraining texts (`ppo.pretraining`).
        gpu: total memory of the device in bytes; 0 for a CPU.
    """
    dtype_bytes = dtype_bytes_of(spec)
    columns = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    items = [item for role in roles for item in _role_items(spec, role, slots, columns, gpu)]
    if spec.training.shards_weights:
        updates = {role.name: _activations(role, spec, dtype_bytes) for role in roles if role.trained}
        logprobs = [_proximal_pass(role, spec, dtype_bytes) for role in roles if role.name == "actor"]
        transient = [largest_pass(spec, _local(spec, roles), updates, logprobs, bool(gpu))]
    else:
        transient = [_transient(role, spec, dtype_bytes, bool(gpu)) for role in roles if role.trained]
    for actor in (role for role in roles if role.name == "actor"):
        if spec.rollout.backend == "vllm":
            items += _vllm(spec, gpu, actor.shape.vocab * actor.shape.width * dtype_bytes, transient)
            if not gpu:
                size = actor.shape.weights * dtype_bytes
                items.append(Item("vLLM: weights", size, f"{actor.shape.weights:,} × {dtype_bytes} B"))
                items.append(_kv_cache("vLLM: keys and values", actor.shape, slots, columns, dtype_bytes))
        else:
            items.append(_kv_cache("actor: keys and values", actor.shape, slots, columns, dtype_bytes))
            rows = slots if spec.evaluation is None else max(slots, evaluation_rows(spec, spec.evaluation.count))
            items.append(_sampling("actor: sampling", actor.shape, rows, dtype_bytes))
            if not gpu:
                items += _decode_copies(actor.shape, dtype_bytes, transient)
        items += _optional_items(spec, actor, columns, text_tokens)
    if not gpu:
        items.append(_freed_blocks(transient))
    else:
        items.append(Item("the GPU's libraries", GPU_RESERVE, f"{GPU_RESERVE:,} B: context, kernels, graphs, fragmentation"))
    return sorted([*items, *transient], key=lambda item: -item.size)


def _freed_blocks(transient: list[Item]) -> Item:
    """Main memory that malloc keeps of freed activations, in gaps into which those of rows of other lengths do not fit."""
    size = sum(item.size for item in transient if item.name.endswith(": activations"))
    return Item("freed activations", size * FREED_PERCENT // 100, f"{FREED_PERCENT} % of {size:,} B, kept by malloc")


def _served(spec: RunSpec) -> dict[str, float]:
    """Shares of a GPU's memory of reward models that vLLM serves, by role."""
    return {f"reward {n}": s.memory_share for n, s in enumerate(spec.models.reward.sources(), 1) if s.served_by == "vllm"}


def _local(spec: RunSpec, roles: list[Role]) -> list[Role]:
    """Roles that vLLM does not serve."""
    return [role for role in roles if role.name not in _served(spec)]


def _role_items(spec: RunSpec, role: Role, slots: int, columns: int, gpu: int) -> Iterator[Item]:
    """Weights, KV cache and training state of a role; the actor's cache is the decoder's."""
    shape, name, dtype_bytes = role.shape, role.name, dtype_bytes_of(spec)
    if (share := _served(spec).get(name)) is not None:
        yield Item(f"{name}: vLLM", int(share * gpu), f"{share} of the GPU's {gpu:,} B (memory_share)")
        return
    if spec.training.shards_weights:
        if name == "actor":
            yield Item(f"{name}: weights", shape.weights * dtype_bytes, f"{shape.weights:,} × {dtype_bytes} B (for decoding)")
        yield from sharded_items(spec, role)
        if role.trained and not gpu:
            yield checkpoint_copies(spec, role)
    elif role.own:
        yield Item(f"{name}: weights", shape.weights * dtype_bytes, f"{shape.weights:,} × {dtype_bytes} B")
    frozen_head = name == "reference" or (name == "actor" and spec.models.lora is not None)
    if frozen_head and (role.own or spec.training.shards_weights) and not gpu and dtype_bytes < 4:
        yield Item(f"{name}: head in float32", shape.vocab * shape.width * 4, f"{shape.vocab:,} × {shape.width:,} × 4 B")
    if spec.training.shards_weights:
        return
    if role.caches and name != "actor" and spec.overlap.intra_step == "per_chunk":
        # One more on a GPU, for rows that only pad a pass.
        yield _kv_cache(f"{name}: keys and values", shape, slots + bool(gpu), columns, dtype_bytes)
    if role.trained:
        yield from _training_state(spec, role, dtype_bytes, bool(gpu))


def _optional_items(spec: RunSpec, actor: Role, columns: int, text_tokens: int) -> Iterator[Item]:
    """Memory of settings that are off by default."""
    dtype_bytes = dtype_bytes_of(spec)
    if spec.ppo.ema_decay is not None:
        size = actor.trained * max(4, dtype_bytes)
        yield Item("actor: moving average", size, f"{actor.trained:,} × {max(4, dtype_bytes)} B (ppo.ema_decay)")
    if text_tokens:
        yield Item("texts that are mixed in", text_tokens * TOKEN_BYTES, f"{text_tokens:,} tokens × {TOKEN_BYTES} B")
    if spec.overlap.update_overlap:
        sums = 1 + spec.ppo.whiten_advantages + spec.ppo.is_regularized
        size = sums * actor.trained * dtype_bytes
        yield Item("actor: early gradients", size, f"{sums} × {actor.trained:,} × {dtype_bytes} B (update overlap)")
    if spec.evaluation is not None:
        rows = evaluation_rows(spec, spec.evaluation.count)
        yield _kv_cache("evaluation: keys and values", actor.shape, rows, columns, dtype_bytes)
        if spec.rollout.backend == "vllm":
            yield _sampling("evaluation: sampling", actor.shape, rows, dtype_bytes)


def decode_slots(spec: RunSpec) -> int:
    """Maximum number of responses in flight on a rank: its share of (B + Δ_max)·G, or of B·G without deferral."""
    extra = spec.overlap.overcommit.max if spec.overlap.inter_step != "off" else 0
    return math.ceil((spec.ppo.batch_size + extra) * spec.ppo.group_size / spec.resources.ranks)


def rows_on_rank(spec: RunSpec) -> int:
    """Most rows of a batch that one rank trains, if all responses have maximum length.

    In sequential mode and with sharded weights ranks train equally many tokens; with streaming each trains what it has decoded.
    """
    if (spec.overlap.intra_step == "off" or spec.training.shards_weights) and not spec.ppo.dynamic_sampling:
        return math.ceil(spec.ppo.rows / spec.resources.ranks)
    return min(spec.ppo.rows, decode_slots(spec))


def evaluation_rows(spec: RunSpec, prompts: int) -> int:
    """Held-out prompts that a rank decodes together: those of a step, or more if these are few and short."""
    ranks, columns = spec.resources.ranks, spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    return min(math.ceil(prompts / ranks), max(spec.ppo.rows // ranks, EVALUATION_TOKENS // columns))


def _kv_cache(name: str, shape: Shape, rows: int, columns: int, dtype_bytes: int) -> Item:
    size = rows * columns * shape.cached * dtype_bytes
    return Item(name, size, f"{rows} rows × {columns} tokens × {shape.cached:,} × {dtype_bytes} B")


def pack_bytes(largest: int, devices: int) -> int:
    """Largest size of a pack of weights. `largest`: bytes of the largest weight; `devices`: devices of vLLM's own, 0 if shared.

    Over NCCL a pack ends with the weight that exceeds `PACK_BYTES`. A buffer shared by CUDA IPC must hold any weight.
    """
    return PACK_BYTES + largest if devices else max(PACK_BYTES, largest)


def _vllm(spec: RunSpec, gpu: int, largest: int, transient: list[Item]) -> Iterator[Item]:
    """vLLM's share of the actor's GPU, if any, and packs of weights on their way to it. `largest`: size of the largest one."""
    if gpu and not spec.resources.decoding_devices:
        yield _shared_gpu(spec, gpu, transient)
    if spec.models.lora is None:  # adapters are small
        pack = pack_bytes(largest, spec.resources.decoding_devices)
        yield Item("weights on their way to vLLM", 2 * pack, f"2 packs × {pack:,} B (rollout.backend)")


def _shared_gpu(spec: RunSpec, gpu: int, transient: list[Item]) -> Item:
    """vLLM's share of a GPU; where it sleeps during the update, less the memory that the update uses in that time."""
    share = spec.rollout.vllm_memory_share
    size, arithmetic = int(share * gpu), f"{share} of the GPU's {gpu:,} B (rollout.vllm_memory_share)"
    if not spec.rollout.vllm_sleep:
        return Item("vLLM", size, arithmetic)
    reused = sum(item.size for item in transient)
    arithmetic += f", less {reused:,} B that the update uses while vLLM sleeps (rollout.vllm_sleep)"
    return Item("vLLM", max(0, size - reused), arithmetic)


def _decode_copies(shape: Shape, dtype_bytes: int, transient: list[Item]) -> Iterator[Item]:
    """Copies of linear weights for decoding on a CPU, less the memory that the update uses when they are freed.

    An upper bound: norms, biases and our own architecture's positions are counted and not copied.
    """
    weights = shape.weights - (shape.vocab * shape.width if shape.tied is False else 0)
    reused = sum(item.size for item in transient)
    if dtype_bytes == 4 and weights * dtype_bytes >= max(LEAST_DECODE_COPY, reused):
        arithmetic = f"{weights:,} × {dtype_bytes} B, less {reused:,} B that the update uses when they are freed"
        yield Item("actor: weights for decoding", weights * dtype_bytes - reused, arithmetic)


def _sampling(name: str, shape: Shape, rows: int, dtype_bytes: int) -> Item:
    per_entry = dtype_bytes + SAMPLED_PER_ENTRY * max(4, dtype_bytes) + 8
    return Item(name, rows * shape.vocab * per_entry, f"{rows} rows × {shape.vocab:,} words × {per_entry} B")


def _training_state(spec: RunSpec, role: Role, dtype_bytes: int, on_gpu: bool) -> list[Item]:
    """Gradients and optimizer state of a role, as its training backend holds them."""
    return _plain_state(role, dtype_bytes) if spec.training.backend == "plain" else _zero_state(spec, role, on_gpu)


def _optimizer_bytes(dtype_bytes: int) -> int:
    """Optimizer state per weight of `dtype_bytes`: two moments, and a float32 master weight for a bfloat16 one."""
    return (8 if dtype_bytes <= 4 else 16) + (4 if dtype_bytes == 2 else 0)


def _plain_state(role: Role, dtype_bytes: int) -> list[Item]:
    optimizer, gradient = _optimizer_bytes(dtype_bytes), max(4, dtype_bytes)
    return [
        Item(f"{role.name}: gradients", role.trained * gradient, f"{role.trained:,} × {gradient} B"),
        Item(f"{role.name}: optimizer", role.trained * optimizer, f"{role.trained:,} × {optimizer} B"),
    ]


def _zero_state(spec: RunSpec, role: Role, on_gpu: bool) -> list[Item]:
    """DeepSpeed ZeRO on one rank: its shard of the partitioned state, in float32."""
    ranks, stage, trained = spec.resources.ranks, spec.training.zero_stage, role.trained
    shard = f"{trained:,} ÷ {ranks} ranks"
    partitioned = stage > 1
    gradients = f"{shard if partitioned else f'{trained:,}'} × 4 B (ZeRO {stage})"
    items = [Item(f"{role.name}: gradients", trained * 4 // (ranks if partitioned else 1), gradients)]
    if not on_gpu or spec.training.offload == "off":
        items.append(Item(f"{role.name}: optimizer", trained * 12 // ranks, f"{shard} × 12 B"))
    return items


def checkpoint_bytes(spec: RunSpec, roles: list[Role]) -> int:
    """Approximate size of one checkpoint on disk: trained weights and moments."""
    dtype_bytes = dtype_bytes_of(spec)
    # The moving average is written twice: as the actor's weights, and in its own precision.
    average = roles[0].trained * (dtype_bytes + max(4, dtype_bytes)) if spec.ppo.ema_decay is not None else 0
    return average + sum(role.trained * (_optimizer_bytes(dtype_bytes) + dtype_bytes) for role in roles)


def _transient(role: Role, spec: RunSpec, dtype_bytes: int, on_gpu: bool) -> Item:
    """The larger of a micro-batch's activations and the temporary of AdamW's step, which exists after them.

    The temporary is the square root of every second moment; a GPU's fused kernel has none.
    """
    activations = _update_pass(role, spec, dtype_bytes)
    temporary = 0 if on_gpu else max(4, dtype_bytes)
    if role.trained * temporary <= activations.size:
        return activations
    arithmetic = f"{role.trained:,} × {temporary} B, more than the activations before it, {activations.arithmetic}"
    return Item(f"{role.name}: the optimizer's step", role.trained * temporary, arithmetic)


def _update_pass(role: Role, spec: RunSpec, dtype_bytes: int) -> Item:
    """The larger of an update's activations and of a pass of the proximal log-probs."""
    held = _activations(role, spec, dtype_bytes)
    update = Item(f"{role.name}: activations", held.size, held.arithmetic)
    return max(update, _proximal_pass(role, spec, dtype_bytes), key=lambda item: item.size)


def _activations(role: Role, spec: RunSpec, dtype_bytes: int) -> Activations:
    """Activations of the retained passes, and of the head's or one block's backward pass: these two follow each other."""
    shape, recompute = role.shape, spec.training.recompute
    tokens, bound = pass_tokens(spec)
    passes, block = _retained_passes(spec), block_bytes(shape, recompute, dtype_bytes)
    per_token, matrix = block.recomputed + block.gradients, shape.feed_forward * shape.width
    head, head_words = _head(role, spec, passes * tokens, tokens, dtype_bytes)
    saved = f"{passes * tokens:,} tokens × {shape.layers} × {block.saved:,} B"
    passed = f"({f'{passes} passes of ' if passes > 1 else ''}{tokens:,} tokens a pass: {bound})"
    return Activations(
        saved=passes * tokens * shape.layers * block.saved,
        layer=passes * tokens * block.saved,
        head=head,
        # The gradient of a block's largest matrix exists before it is added to the sum of all passes.
        block=tokens * per_token + matrix * dtype_bytes,
        tied=shape.vocab * shape.width * dtype_bytes if role.is_language_model and shape.tied is not False else 0,
        head_arithmetic=f"{saved} + {head_words} {passed}",
        block_arithmetic=f"{saved} + {tokens:,} × {per_token:,} B + {matrix:,} × {dtype_bytes} B {passed}",
    )


def _head(role: Role, spec: RunSpec, tokens: int, of_a_pass: int, dtype_bytes: int) -> tuple[int, str]:
    """Bytes while the head's gradient is computed, and their arithmetic. `of_a_pass`: tokens of one of the retained passes."""
    shape, recomputes = role.shape, spec.training.recompute != "off"
    # The last norm, and a copy of the states that predict response tokens.
    states = norm_bytes(shape, dtype_bytes) + shape.width * dtype_bytes
    size, words = tokens * states, f"{tokens:,} × {states:,} B"
    if not role.is_language_model:
        return size, words
    rows, per_entry = min(tokens, _predicted_tokens(spec)), _logit_bytes(spec, dtype_bytes)
    if recomputes:  # a slice at a time
        rows = min(rows, of_a_pass, HEAD_SLICE)
    size, words = size + rows * shape.vocab * per_entry, f"{words} + {rows:,} × {shape.vocab:,} × {per_entry} B"
    if recomputes:  # the head's gradient, to which the slices are added
        size += shape.vocab * shape.width * dtype_bytes
        words += f" + {shape.vocab:,} × {shape.width:,} × {dtype_bytes} B"
    return size, words


def _logit_bytes(spec: RunSpec, dtype_bytes: int) -> int:
    """Bytes per token and vocabulary entry while the gradient of log-probs is computed."""
    return LOGITS_PER_ENTRY * max(4, dtype_bytes) * (2 if spec.ppo.entropy_coefficient else 1)


def _proximal_pass(role: Role, spec: RunSpec, dtype_bytes: int) -> Item:
    """Logits of the actor's log-prob pass, without a graph over the whole batch where the update has several optimizer steps."""
    columns = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    rows = rows_on_rank(spec)
    reads = min(rows * spec.rollout.max_new_tokens, max(spec.ppo.micro_batch_tokens, columns))  # logits of responses only
    if role.name != "actor" or spec.ppo.optimizer_steps == 1:
        reads = 0
    elif spec.training.recompute != "off":
        reads = min(reads, HEAD_SLICE)
    per_entry = LOGITS_PER_ENTRY * max(4, dtype_bytes)
    arithmetic = f"{reads:,} tokens × {role.shape.vocab:,} × {per_entry} B (a pass of the proximal log-probs over {rows} rows)"
    return Item(f"{role.name}: activations", reads * role.shape.vocab * per_entry, arithmetic)


def pass_tokens(spec: RunSpec) -> tuple[int, str]:
    """Most padded tokens of one pass of the update, and the bound that applies.

    A pass takes rows of one mini-batch of a rank up to `ppo.micro_batch_tokens`, and at least one row.
    """
    columns, rows, texts = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens, _mini_batch_rows(spec), _text_rows(spec)
    limits = [(rows * columns, f"{rows} rows of a mini-batch × {columns} tokens of prompt and response")]
    if spec.ppo.pretraining is not None:
        longest = spec.ppo.pretraining.max_tokens
        limits.append((texts * longest, f"{texts} texts × {longest} tokens (ppo.pretraining)"))
        columns = max(columns, longest)
    one_row = (columns, f"one row of {columns} tokens, above ppo.micro_batch_tokens")
    return min(max(limits), max((spec.ppo.micro_batch_tokens, "ppo.micro_batch_tokens"), one_row))


def _mini_batch_rows(spec: RunSpec) -> int:
    return min(spec.ppo.rows // spec.ppo.mini_batches, rows_on_rank(spec))  # a mini-batch may be one rank's


def _text_rows(spec: RunSpec) -> int:
    """Pretraining texts of a mini-batch on a rank."""
    texts = spec.ppo.pretraining
    return math.ceil(texts.sequences / spec.ppo.mini_batches / spec.resources.ranks) if texts is not None else 0


def _predicted_tokens(spec: RunSpec) -> int:
    """Most tokens of a mini-batch whose log-probs a rank computes: of responses, or of whole texts."""
    texts = _text_rows(spec) * spec.ppo.pretraining.max_tokens if spec.ppo.pretraining is not None else 0
    return max(_mini_batch_rows(spec) * spec.rollout.max_new_tokens, texts)


def _retained_passes(spec: RunSpec) -> int:
    """Passes whose activations exist at one time; at most all of a batch of longest responses."""
    if spec.ppo.optimizer_steps > 1:
        return 1
    columns = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    whole = math.ceil(rows_on_rank(spec) * columns / pass_tokens(spec)[0])
    return max(1, min(spec.training.retained_passes, whole))

"""Memory of roles whose weights are sharded over the ranks by FSDP2 (`training.backend: fsdp2`).

A rank holds its part of everything, and during a pass one unit's whole weights at a time: the embedding, a transformer block, or
the rest with the head, which stays for the whole pass (`oppo_core.training.sharded_module`). The passes of all roles follow each
other in one thread, so only the largest counts. Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oppo_contract.spec import RunSpec
from oppo_estimate.activations import Activations
from oppo_estimate.items import Item, Role, dtype_bytes_of


@dataclass(frozen=True, slots=True)
class Units:
    """Number of weights of each kind of unit."""

    root: int
    embedding: int
    block: int


def units_of(role: Role) -> Units:
    """A role's units. Where it is not known whether the head is tied to the embedding, each is the larger of the two cases."""
    shape, table = role.shape, role.shape.vocab * role.shape.width
    if not role.is_language_model:
        return Units(0, table, max(0, shape.weights - table) // max(1, shape.layers))
    tables = 2 if shape.tied is False else 1
    return Units(table, 0 if shape.tied else table, max(0, shape.weights - tables * table) // max(1, shape.layers))


def sharded_items(spec: RunSpec, role: Role) -> Iterator[Item]:
    """This rank's parts of a role's weights, gradients and optimizer state."""
    ranks, dtype_bytes, weights = spec.resources.ranks, dtype_bytes_of(spec), role.shape.weights
    stored = max(4, dtype_bytes) if role.trained else dtype_bytes
    yield Item(f"{role.name}: sharded weights", weights * stored // ranks, f"{weights:,} ÷ {ranks} ranks × {stored} B")
    if role.trained:
        trained = f"{role.trained:,} ÷ {ranks} ranks"
        yield Item(f"{role.name}: gradients", role.trained * stored // ranks, f"{trained} × {stored} B")
        yield Item(f"{role.name}: optimizer", role.trained * 2 * stored // ranks, f"{trained} × {2 * stored} B")


def checkpoint_copies(spec: RunSpec, role: Role) -> Item:
    """Copies in main memory of what a trained role saves, while a checkpoint is written in the background.

    Moments and float32 masters; weights in the run's precision too: the critic's, of which each rank has its shards, and the
    actor's, on the first rank.
    """
    ranks, dtype_bytes = spec.resources.ranks, dtype_bytes_of(spec)
    stored, is_actor = max(4, dtype_bytes), role.name == "actor"
    per_weight = stored * (2 + (stored > dtype_bytes)) + dtype_bytes * (not is_actor)
    size, words = role.trained * per_weight // ranks, f"{role.trained:,} ÷ {ranks} ranks × {per_weight} B"
    if is_actor and role.trained == role.shape.weights:  # adapters are written at once
        size, words = size + role.trained * dtype_bytes, f"{words} + {role.trained:,} × {dtype_bytes} B"
    return Item(f"{role.name}: copies for a checkpoint", size, words)


def largest_pass(spec: RunSpec, roles: list[Role], updates: dict[str, Activations], logprobs: list[Item], on_gpu: bool) -> Item:
    """The largest of all roles' passes and optimizer steps, with the weights that are gathered for it.

    Args:
        updates: activations of the trained roles, by name.
        logprobs: of the passes of the proximal log-probs.
    """
    passes = [item for role in roles for item in _passes(spec, role, updates.get(role.name), on_gpu)]
    for role in (role for role in roles if role.name == "actor"):
        words, size = _gathered(units_of(role), dtype_bytes_of(spec))
        passes += [Item(item.name, item.size + size, f"{item.arithmetic} + {words}") for item in logprobs]
    return max(passes, key=lambda item: item.size)


def _gathered(u: Units, d: int) -> tuple[str, int]:
    """Weights that a pass without gradients gathers: a unit is copied from the buffer that received it, the head as well."""
    unit = max(u.embedding, u.block)
    if u.root > 2 * unit:
        return f"2 × {u.root:,} × {d} B: the gathered head", 2 * u.root * d
    return f"({u.root:,} + 2 × {unit:,}) × {d} B: the head and a gathered unit", (u.root + 2 * unit) * d


def _passes(spec: RunSpec, role: Role, update: Activations | None, on_gpu: bool) -> Iterator[Item]:
    u, d = units_of(role), dtype_bytes_of(spec)
    words, size = _gathered(u, d)
    yield Item(f"{role.name}: a pass", size, words)
    if update is None:
        return
    yield from _update_items(role, u, update, d)
    if not on_gpu:
        shard, reduced = role.trained // spec.resources.ranks, max(4, d)
        yield Item(f"{role.name}: the optimizer's step", shard * reduced, f"{shard:,} × {reduced} B")


def _update_items(role: Role, u: Units, update: Activations, d: int) -> Iterator[Item]:
    """The moments of a backward pass that may be its largest: weights, their gradients, and activations.

    Gradients are summed over the ranks in float32 at least, in a buffer that exists until the next unit's gradients are ready.
    """
    reduced = max(4, d)
    name, words = f"{role.name}: activations", f"({u.root:,} + {u.block:,}) × {d} B: weights of the head and a block"
    yield Item(name, update.saved + update.head + (u.root + u.block) * d, f"{update.head_arithmetic} + {words}")
    # While a block's gradients are computed, the weights of the next one are gathered.
    words = f"{u.root:,} × {2 * d} B: weights and gradients of the head; {u.block:,} × {2 * d} B: weights of two blocks"
    first = update.saved + update.block + (u.root + u.block) * 2 * d
    second = first - update.layer + u.block * reduced
    if second > first:
        words += f"; {u.block:,} × {reduced} B: the gradients of another; less {update.layer:,} B of its activations"
    yield Item(name, max(first, second), f"{update.block_arithmetic} + {words}")
    ends = {
        f"{u.root:,} × {2 * d + reduced} B: the head": u.root * (2 * d + reduced),
        f"{u.root:,} × {reduced} B + {u.embedding:,} × {2 * d} B: head and embedding": u.root * reduced + u.embedding * 2 * d,
        f"{u.root:,} × {2 * d} B + {u.block:,} × {3 * d + reduced} B: the head and a block": (
            u.root * 2 * d + u.block * (3 * d + reduced)
        ),
    }
    words, size = max(ends.items(), key=lambda end: end[1])
    yield Item(f"{role.name}: gradients of a unit", size, words)

"""Memory of roles whose weights are sharded over the ranks by FSDP2 (`training.backend: fsdp2`).

A rank holds its part of everything, and during a pass one unit's whole weights at a time: the embedding, a transformer block, or
the rest with the head, which stays for the whole pass (`oppo_core.training.sharded_module`). The passes of all roles follow each
other in one thread, so only the largest counts. Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oppo_contract.spec import RunSpec
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


def largest_pass(spec: RunSpec, roles: list[Role], activations: dict[str, Item], on_gpu: bool) -> Item:
    """The largest of all roles' passes and optimizer steps. `activations`: of the trained roles, by name."""
    return max(
        (item for role in roles for item in _passes(spec, role, activations.get(role.name), on_gpu)), key=lambda item: item.size
    )


def _passes(spec: RunSpec, role: Role, activations: Item | None, on_gpu: bool) -> Iterator[Item]:
    u, d = units_of(role), dtype_bytes_of(spec)
    reduced = max(4, d)  # gradients are summed over the ranks in float32
    # A gathered unit is copied from the buffer that received it.
    unit = max(u.embedding, u.block)
    if u.root > 2 * unit:
        yield Item(f"{role.name}: a pass", 2 * u.root * d, f"2 × {u.root:,} × {d} B: the gathered head")
    else:
        yield Item(
            f"{role.name}: a pass", (u.root + 2 * unit) * d, f"({u.root:,} + 2 × {unit:,}) × {d} B: the head and a gathered unit"
        )
    if activations is None:
        return
    size = activations.size + (u.root + u.block) * d
    words = f"{activations.arithmetic} + ({u.root:,} + {u.block:,}) × {d} B: the head and a block"
    yield Item(f"{role.name}: activations", size, words)
    ends = {
        f"{u.root:,} × {2 * d + reduced} B: the head": u.root * (2 * d + reduced),
        f"{u.root:,} × {reduced} B + {u.embedding:,} × {2 * d} B: head and embedding": u.root * reduced + u.embedding * 2 * d,
        f"{u.root:,} × {2 * d} B + {u.block:,} × {3 * d + reduced} B: the head and a block": (
            u.root * 2 * d + u.block * (3 * d + reduced)
        ),
    }
    words, size = max(ends.items(), key=lambda end: end[1])
    yield Item(f"{role.name}: gradients of a unit", size, words)
    if not on_gpu:
        shard = role.trained // spec.resources.ranks
        yield Item(f"{role.name}: the optimizer's step", shard * reduced, f"{shard:,} × {reduced} B")

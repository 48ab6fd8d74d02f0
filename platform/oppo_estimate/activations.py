"""What the passes of an update hold besides weights, from a model's shape: activations, their gradients, and logits.

Counted for the operations of transformers' decoder layers and of our own architecture, with torch's fused attention
(tests/engine/distributed/test_memory_estimate.py). Sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from oppo_estimate.shapes import Shape


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes per token of one transformer block in an update.

    `saved`: from the forward pass to the block's backward pass. `recomputed`: only during that backward pass. `gradients`: of
    activations, the most at one time.
    """

    saved: int
    recomputed: int
    gradients: int


@dataclass(frozen=True, slots=True)
class Activations:
    """Activations of an update in bytes: those of all passes that are held together, and the largest of one backward pass.

    `saved`: of all blocks, of which `layer` are one block's. `head`: while the head's gradient is computed. `block`: while that
    of a block is, which is after `head` has been freed. `tied`: a head's gradient that exists until the embedding's is added.
    """

    saved: int
    layer: int
    head: int
    block: int
    tied: int
    head_arithmetic: str
    block_arithmetic: str

    @property
    def size(self) -> int:
        """The most at one time where weights are whole."""
        return self.saved + max(self.head, self.block + self.tied)

    @property
    def arithmetic(self) -> str:
        """How `size` is computed."""
        if self.head > self.block + self.tied:
            return self.head_arithmetic
        return self.block_arithmetic + (f" + {self.tied:,} B: the tied head's gradient" if self.tied else "")


def block_bytes(shape: Shape, recompute: str, dtype_bytes: int) -> BlockBytes:
    """Bytes per token of one block with this setting of `training.recompute`."""
    d, inner = dtype_bytes, shape.feed_forward * dtype_bytes
    attention = 2 * (shape.queries + shape.keys) * d  # queries, keys, values, and the result
    if shape.gated:
        projections, feed_forward = 2 * inner, 4 * inner  # gate and up; the activation of the gate, and its product with up
    else:
        projections, feed_forward = inner, 2 * inner  # up, and its activation
    norms = 2 * norm_bytes(shape, d)
    gradients = shape.width * d + projections
    whole = norms + attention + feed_forward
    given = shape.width * d  # a block's input, from which it is recomputed
    if recompute == "full":
        return BlockBytes(given, whole - given, gradients)
    if recompute == "selective":  # the outputs of matrix products and of attention are saved
        outputs = 2 * given + attention + projections
        return BlockBytes(given + outputs, norms + feed_forward - given - projections, gradients)
    return BlockBytes(whole, 0, gradients)


def norm_bytes(shape: Shape, dtype_bytes: int) -> int:
    """Bytes per token that a norm saves: an RMS norm its input, in float32 at least, that over its size, and its output.

    A layer norm, which is one operation, saves its input and its output.
    """
    return shape.width * (max(4, dtype_bytes) + 2 * dtype_bytes if shape.gated else 2 * dtype_bytes)

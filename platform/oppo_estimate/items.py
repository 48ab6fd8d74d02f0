"""What an estimate of memory consists of: the models, and the items of the sum."""

from __future__ import annotations

from dataclasses import dataclass

from oppo_contract.spec import RunSpec
from oppo_estimate.shapes import Shape

LANGUAGE_MODELS = ("actor", "reference")
DTYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


def dtype_bytes_of(spec: RunSpec) -> int:
    """Bytes of a number in the run's precision."""
    return DTYPE_BYTES[spec.resources.dtype]


@dataclass(frozen=True, slots=True)
class Item:
    """One use of memory: its name, its size in bytes, and the arithmetic behind the size."""

    name: str
    size: int
    arithmetic: str


@dataclass(frozen=True, slots=True)
class Role:
    """A model on a device.

    `trained`: number of trained weights; `caches`: whether it has a KV cache; `own`: false if its weights are the actor's and
    counted there.
    """

    name: str
    shape: Shape
    trained: int = 0
    caches: bool = True
    own: bool = True

    @property
    def is_language_model(self) -> bool:
        """Whether its head gives logits, not one value."""
        return self.name in LANGUAGE_MODELS

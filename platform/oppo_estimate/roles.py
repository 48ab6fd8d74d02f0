"""The models of a run as roles on devices: which are trained, which have a KV cache, and how many responses are in flight."""

from __future__ import annotations

from collections.abc import Mapping

from oppo_contract.spec import RunSpec
from oppo_estimate.items import LANGUAGE_MODELS, Role
from oppo_estimate.shapes import Head, Shape


def role_head(name: str) -> Head:
    """The head of a role's model."""
    return "lm" if name in LANGUAGE_MODELS else "scalar"


def build_role(spec: RunSpec, name: str, shape: Shape) -> Role:
    """The role `name` of `RunSpec.role_models` with a model of this shape."""
    # Rewards with their own tokenizer read finished responses in one pass, without a KV cache.
    texts = {f"reward {number}" for number, source in enumerate(spec.models.reward.sources(), 1) if source.reads != "tokens"}
    own = name != "reference" or not spec.models.reference_is_base or spec.resources.scoring_devices > 0
    trained = trained_weights(spec, name, shape) if name in ("actor", "critic") else 0
    return Role(name, shape, trained, name not in texts, own)


def build_roles(spec: RunSpec, shapes: Mapping[str, Shape]) -> list[Role]:
    """All roles, the actor first; `shapes` by the names of `RunSpec.role_models`."""
    return [build_role(spec, name, shapes[name]) for name in spec.role_models()]


def trained_weights(spec: RunSpec, name: str, shape: Shape) -> int:
    """Number of trained weights of the actor or the critic."""
    lora = spec.models.lora
    if lora is None or (name == "critic" and not lora.critic):
        return shape.weights
    # Seven linear layers per block, each with two low-rank matrices.
    return min(shape.weights, 7 * shape.layers * 2 * shape.width * lora.rank)


def split_roles(spec: RunSpec, roles: list[Role]) -> list[list[Role]]:
    """The roles on each device of a rank, the actor's device first."""
    if not spec.resources.scoring_devices:
        return [roles]
    return [[role for role in roles if (role.name == "actor") == is_actor] for is_actor in (True, False)]

"""Fills settings that the spec leaves empty, once, at the start of a run."""

from __future__ import annotations

from pathlib import Path

from oppo_contract.chosen_defaults import chosen_defaults, keep_chosen, with_chosen
from oppo_contract.spec import RunSpec, load_stored_spec
from oppo_core.checkpointing.rank_states import read_state
from oppo_estimate.shapes import Head, read_shape

HEADS: dict[str, Head] = {"actor": "lm", "critic": "scalar"}


def resolve_defaults(spec: RunSpec, roots: list[Path], resume: Path | None) -> tuple[RunSpec, list[str]]:
    """The spec with learning rates and chunk size, and a line for each that was empty. `resume`: a verified checkpoint.

    Raises:
        ModelFolderError: the actor's or the critic's folder cannot be read.
    """
    if resume is not None:
        spec = keep_chosen(spec, load_stored_spec(read_state(resume)["spec"]))
    shapes = {role: read_shape(model, HEADS[role], roots) for role, model in spec.role_models().items() if role in HEADS}
    chosen = chosen_defaults(spec, {role: shape.weights for role, shape in shapes.items() if shape is not None})
    lines = [f"{path} is empty; it is {one.value:g}, because {one.reason}" for path, one in chosen.items()]
    return with_chosen(spec, chosen), lines

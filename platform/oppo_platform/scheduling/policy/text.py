"""Phrases shared by several reasons."""

from __future__ import annotations

from collections.abc import Sequence

from oppo_platform.scheduling.policy.snapshot import WaitingRun


def describe_request(run: WaitingRun, model: str = "") -> str:
    """`4 × H100` if all suitable devices are of one model, otherwise `4 cuda devices`."""
    if model:
        return f"{run.devices} × {model}"
    kind = "" if run.kind == "any" else f"{run.kind} "
    return f"{run.devices} {kind}device" + ("s" if run.devices != 1 else "")


def nodes_allowed(run: WaitingRun) -> str:
    """Number of nodes that it may use."""
    if run.nodes is not None:
        return f"{run.nodes} nodes"
    return "one node" if run.nodes_max == 1 else f"at most {run.nodes_max} nodes"


def runs(ids: Sequence[int]) -> str:
    """`Run 4`, `Runs 4 and 7`."""
    if len(ids) == 1:
        return f"Run {ids[0]}"
    return "Runs " + ", ".join(map(str, ids[:-1])) + f" and {ids[-1]}"

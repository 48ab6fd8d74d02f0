"""Submits a checked spec. The check is `usecases.check_spec`; later requests are in `runs.lifecycle`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from django.db import transaction
from typing_extensions import TypedDict

from oppo_contract.presets import PRESETS
from oppo_contract.spec import RunSpec
from oppo_contract.states import RunState
from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.models import User
from oppo_platform.cluster.models import CatalogueItem, DeviceState, Node
from oppo_platform.cluster.selectors import live_nodes
from oppo_platform.notify import run_changed, wake_scheduler
from oppo_platform.projects.models import Project
from oppo_platform.runs.forks import lock_fork_source
from oppo_platform.runs.models import Run, Transition
from oppo_platform.runs.preflight import ModelFacts, NodeOffer, hub_models, required_files, required_models


class DeviceSizes(TypedDict):
    """Driver's name of a node's devices and the memory of the smallest, bytes, by kind."""

    device_model: dict[str, str]
    device_memory: dict[str, int]


def _device_sizes(node: Node) -> DeviceSizes:
    devices = [d for d in node.devices.all() if d.state != DeviceState.GONE and d.memory_bytes]
    largest_first = sorted(devices, key=lambda device: -device.memory_bytes)
    return DeviceSizes(
        device_model={d.kind: d.model for d in largest_first}, device_memory={d.kind: d.memory_bytes for d in largest_first}
    )


def node_offers() -> list[NodeOffer]:
    """Resources of the connected nodes. Models that only other nodes have are among the problems."""
    nodes = list(live_nodes().prefetch_related("devices", "catalogue"))
    others = CatalogueItem.objects.filter(kind="model", problem="").exclude(node__in=nodes).values_list("entry_id", "node__name")
    disconnected = {model: f"node {name}, which has it, is not connected" for model, name in others}
    return [
        NodeOffer(
            name=node.name,
            devices=Counter(d.kind for d in node.devices.all() if d.state != DeviceState.GONE),
            models={
                c.entry_id: ModelFacts(
                    c.task, c.tokenizer_digest, c.context, c.vocab, c.weights, c.layers, c.width, c.cached, c.architecture
                )
                for c in node.catalogue.all()
                if c.kind == "model" and not c.problem
            },
            cpus=node.cpus,
            **_device_sizes(node),
            prompts=frozenset(c.entry_id for c in node.catalogue.all() if c.kind == "prompts" and not c.problem),
            hub=any(c.kind == "hub" for c in node.catalogue.all()),
            rules=frozenset(c.entry_id for c in node.catalogue.all() if c.kind == "rule") or None,  # we have some ourselves
            reward_hosts=frozenset(c.entry_id for c in node.catalogue.all() if c.kind == "reward_host"),
            problems=disconnected | {c.entry_id: c.problem for c in node.catalogue.all() if c.problem},
        )
        for node in nodes
    ]


@transaction.atomic
def submit_run(
    user: User, project: Project, spec: RunSpec, plan: dict[str, Any] | None = None, offers: Sequence[NodeOffer] | None = None
) -> Run:
    """Queue a checked spec, with its plan (`usecases.run_plan`). The caller has checked that the user may submit there.

    `offers`: `node_offers()`, if known. Raises `SpecError` if its checkpoint was deleted since the check.
    """
    now, limit_h = clock.now(), spec.queue.max_runtime_hours
    begins_with = lock_fork_source(spec, project.team_id)
    run = Run.objects.create(
        project=project,
        user=user,
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        spec_version=spec.version,
        preset=matching_preset(spec),
        devices=spec.resources.devices,
        needs=node_requirements(spec, offers),
        priority=spec.queue.priority,
        preemptible=spec.queue.preemptible,
        max_runtime_s=None if limit_h is None else 3600 * limit_h,
        state=RunState.QUEUED,
        reason="Waiting for the scheduler.",
        cursor=1,
        created_at=now,
        queued_at=now,
        total_steps=spec.steps,
        target_reward=spec.budget.target_reward,
        begins_with=begins_with,
        forked_run=begins_with.run_id if begins_with else None,
        forked_step=begins_with.step if begins_with else None,
        plan=plan,
    )
    actor = audit.actor_name(user)
    Transition.objects.create(run=run, old="", new=RunState.QUEUED, reason="Submitted.", actor=actor, at=run.created_at)
    audit.record(project.team_id, actor, "run.submit", f"run {run.pk} {run.name}", project=project.name)
    run_changed(run.pk)
    wake_scheduler()
    return run


def node_requirements(spec: RunSpec, offers: Sequence[NodeOffer] | None = None) -> dict[str, Any]:
    """Requirements on a node, in short: the scheduler reads them, not the whole spec. `offers`: `node_offers()`, if known."""
    hub = hub_models(spec, node_offers() if offers is None else offers)
    models = sorted({requested.id for requested in required_models(spec)} - hub)
    prompts = sorted({file for _, file in required_files(spec)})
    needs = {"kind": spec.device_kind, "models": models, "prompts": prompts, "nodes": spec.resources.nodes}
    return needs | {"hub": True} if hub else needs


def matching_preset(spec: RunSpec) -> str:
    """The preset with the spec's overlap modes, of several the one with its algorithm; or `custom`."""
    modes = {"intra_step": spec.overlap.intra_step, "inter_step": spec.overlap.inter_step}
    fitting = [preset for preset in PRESETS if preset.overlap == modes]
    same = [preset for preset in fitting if preset.settings.get("ppo.algorithm", "ppo") == spec.ppo.algorithm]
    return next((preset.key for preset in (*same, *fitting)), "custom")

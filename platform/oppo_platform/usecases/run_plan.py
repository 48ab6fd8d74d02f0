"""The plan of a run before it is submitted: memory, time, start, and what overlap saves (docs/planning.md).

Assembles pure estimates (`oppo_estimate`), the team's earlier runs and the scheduler's policy; writes nothing. A part that cannot
be estimated says why in `unknown` and never prevents a submission.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Literal, TypeVar

import structlog
from django.db import transaction
from typing_extensions import TypedDict

from oppo_contract.chosen_defaults import Chosen, with_chosen
from oppo_contract.model_folder import TINY
from oppo_contract.spec import RunSpec
from oppo_estimate.calibration import EarlierRun, EstimateInputs, StepEstimate, estimate_step, expected_peak
from oppo_estimate.device_memory import Host, PlannedDevice, find_remedy, planned_devices
from oppo_estimate.device_speed import device_speed
from oppo_estimate.roles import role_head
from oppo_estimate.schedules import PLAIN
from oppo_estimate.shapes import Shape, tiny_shape
from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.models import User
from oppo_platform.clock import iso
from oppo_platform.projects.models import Project
from oppo_platform.runs.labels import change_tags
from oppo_platform.runs.models import Run
from oppo_platform.runs.preflight import ModelFacts, NodeOffer, complete_offers, count_devices
from oppo_platform.runs.services import node_requirements, submit_run
from oppo_platform.scheduling.predicted_start import predict_start
from oppo_platform.usecases.check_spec import ClusterView, chosen_values
from oppo_platform.usecases.earlier_runs import earlier_runs

log = structlog.get_logger(__name__)

Basis = Literal["earlier_runs", "simulated"]
Part = TypeVar("Part")
FAILED = "it could not be estimated; the platform's log has the error"


class MemoryTerm(TypedDict):
    """One use of a device's memory, and the arithmetic behind it. `role`: a model's role, `processes`, or empty."""

    role: str
    use: str
    bytes: int
    arithmetic: str


class DeviceMemory(TypedDict):
    """Estimated memory of `count` equal devices with all responses at maximum length, the largest term first."""

    roles: list[str]
    count: int
    needed_bytes: int
    available_bytes: int
    fits: bool
    terms: list[MemoryTerm]


class MemoryPlan(TypedDict):
    """Memory of each device. `expected_bytes`: of the fullest, by earlier runs; `remedy`: settings by path that make it fit."""

    devices: list[DeviceMemory]
    expected_bytes: int | None
    remedy: dict[str, Any] | None
    unknown: str


class TimePlan(TypedDict):
    """Mean seconds of a step, of `steps` steps, and device-hours. `runs`: the earlier runs of the team that it is based on."""

    step_s: float | None
    steps: int
    duration_s: float | None
    device_hours: float | None
    response_tokens: float | None
    basis: Basis | None
    runs: list[int]
    text: str
    unknown: str


class StartPlan(TypedDict):
    """The expected start if it were submitted now; `text` says why it would wait, `sooner` what would shorten that."""

    at: str | None
    text: str
    sooner: str
    unknown: str


class SavingPlan(TypedDict):
    """Expected seconds that overlap saves against the same run in sequential mode, and their share of that run's time.

    Negative if overlap is expected to cost time.
    """

    seconds: float
    share: float
    basis: Basis
    text: str


class Plan(TypedDict):
    """The plan of a run. `kind` and `device`: those it is estimated for; `saving` is null without overlap or without a time."""

    planned_at: str
    kind: str
    device: str
    memory: MemoryPlan
    time: TimePlan
    start: StartPlan
    saving: SavingPlan | None


def plan_run(spec: RunSpec, chosen: Mapping[str, Chosen], cluster: ClusterView, team_id: int | None) -> Plan | None:
    """The plan of a checked spec; None after an error, which is logged: no estimate may prevent a submission.

    Args:
        chosen: values of the spec's empty settings (`check_spec.chosen_values`).
        team_id: whose earlier runs and quota count; None: of no team, because the user may not submit there.
    """
    return _or_failed(lambda: _plan(with_chosen(spec, chosen), cluster, team_id), None)


def _plan(spec: RunSpec, cluster: ClusterView, team_id: int | None) -> Plan:
    offers = complete_offers(spec, cluster.offers)
    kind = planned_kind(spec, offers)
    offer = planned_offer(spec, offers, kind)
    device = offer.device_model.get(kind, "") if offer is not None else ""
    model, unknown = plan_model(spec, offers, offer, kind)
    memory, time, saving = memory_unknown(unknown), time_unknown(spec, unknown), None
    if model is not None:
        found = _or_failed(lambda: earlier_runs(team_id, spec, kind, device), []) if team_id is not None else []
        memory = _or_failed(lambda: plan_memory(spec, model, found), memory_unknown(FAILED))
        time, saving = _or_failed(lambda: plan_time(spec, model, found, device), (time_unknown(spec, FAILED), None))
    return Plan(
        planned_at=iso(clock.now()),
        kind=kind,
        device=device,
        memory=memory,
        time=time,
        start=_or_failed(lambda: plan_start(spec, cluster, team_id), StartPlan(at=None, text="", sooner="", unknown=FAILED)),
        saving=saving,
    )


def submit_planned(user: User, project: Project, spec: RunSpec, tags: Sequence[str], cluster: ClusterView) -> Run:
    """Queue a checked spec, as `runs.services.submit_run`, with the plan of this moment and with tags.

    Raises:
        SpecError: as `submit_run`. TagRefused: a tag is not allowed; nothing is queued.
    """
    plan = plan_run(spec, chosen_values(spec, cluster.offers), cluster, project.team_id)
    with transaction.atomic():
        run = submit_run(user, project, spec, None if plan is None else dict(plan), cluster.offers)
        if tags:
            change_tags(run.pk, tags, (), audit.actor_name(user))
    return run


def _or_failed(estimate: Callable[[], Part], otherwise: Part) -> Part:
    """The result, or `otherwise` after an error, which is logged."""
    try:
        with transaction.atomic():  # a savepoint within a transaction, which a failed query would end
            return estimate()
    except Exception:
        log.exception("plan_failed")
        return otherwise


def planned_kind(spec: RunSpec, offers: Sequence[NodeOffer]) -> str:
    """The kind of device that the scheduler would allocate: GPUs before CPUs."""
    if spec.device_kind != "any":
        return spec.device_kind
    part = spec.resources.devices // spec.resources.nodes
    return "cuda" if any(count_devices(offer.devices, "cuda") >= part for offer in offers) else "cpu"


def planned_offer(spec: RunSpec, offers: Sequence[NodeOffer], kind: str) -> NodeOffer | None:
    """Of the nodes with enough devices the one with the smallest, because the run may start there; None if there is none."""
    part = spec.resources.devices // spec.resources.nodes
    suitable = [o for o in offers if o.device_memory.get(kind) and count_devices(o.devices, kind) >= part]
    return min(suitable, key=lambda o: (o.device_memory[kind], o.name), default=None)


def plan_model(
    spec: RunSpec, offers: Sequence[NodeOffer], offer: NodeOffer | None, kind: str
) -> tuple[EstimateInputs | None, str]:
    """Shapes and device of the estimates, or None and why they are not known."""
    if offer is None:
        return None, "no connected worker has its models, prompts and devices"
    host = Host(offer.device_memory[kind], max(1, offer.cpus), kind == "cuda")
    shapes, unknown = model_shapes(spec, offers)
    if unknown:
        return None, unknown
    speed = device_speed(offer.device_model.get(kind, ""), kind, spec)
    return EstimateInputs(shapes, host, speed, _uses_transformers(spec, offers)), ""


def model_shapes(spec: RunSpec, offers: Sequence[NodeOffer]) -> tuple[dict[str, Shape], str]:
    """The shapes of all roles, and why one is unknown; empty if none is."""
    known: dict[str, ModelFacts] = {}
    for offer in offers:
        known |= {name: facts for name, facts in offer.models.items() if name not in known or not known[name].layers}
    shapes: dict[str, Shape] = {}
    for role, model in spec.role_models().items():
        facts = known.get(model.path or "")
        if model.tiny is not None:
            shapes[role] = tiny_shape(model.tiny, role_head(role))
        elif facts is None:
            return {}, f"{model.path} is downloaded when the run starts, so that its shape is not known before"
        elif not (facts.layers and facts.weights):
            return {}, f"the worker does not report the shape of {model.path}"
        else:
            shapes[role] = Shape(facts.weights, facts.layers, facts.width, facts.vocab, facts.context, facts.cached)
    return shapes, ""


def _uses_transformers(spec: RunSpec, offers: Sequence[NodeOffer]) -> bool:
    """Whether a model is not of our own architecture."""
    ours = {name for offer in offers for name, facts in offer.models.items() if facts.architecture == TINY}
    return any(model.path is not None and model.path not in ours for model in spec.role_models().values())


def memory_unknown(reason: str) -> MemoryPlan:
    """A plan without memory."""
    return MemoryPlan(devices=[], expected_bytes=None, remedy=None, unknown=reason)


def plan_memory(spec: RunSpec, model: EstimateInputs, earlier: Sequence[EarlierRun]) -> MemoryPlan:
    """Memory of each device, and the settings to change if it does not fit."""
    available = model.host.memory

    def devices(of: RunSpec) -> list[PlannedDevice]:
        return planned_devices(of, model.shapes, model.host, model.transformers)

    def needed(of: RunSpec) -> int:
        return max(device.needed for device in devices(of))

    listed = [_device_memory(device, available) for device in devices(spec)]
    remedy = None if all(device["fits"] for device in listed) else find_remedy(spec, needed, available)
    return MemoryPlan(devices=listed, expected_bytes=expected_peak(spec, model, earlier), remedy=remedy, unknown="")


def _device_memory(device: PlannedDevice, available: int) -> DeviceMemory:
    terms = [
        MemoryTerm(role=role if use else "", use=use or role, bytes=item.size, arithmetic=item.arithmetic)
        for item in device.items
        for role, _, use in [item.name.partition(": ")]
    ]
    return DeviceMemory(
        roles=list(device.roles),
        count=device.count,
        needed_bytes=device.needed,
        available_bytes=available,
        fits=device.needed <= available,
        terms=terms,
    )


def planned_steps(spec: RunSpec) -> int:
    """Steps that the run trains; a fork begins with its checkpoint's."""
    return spec.steps - (spec.fork.step if spec.fork is not None else 0)


def time_unknown(spec: RunSpec, reason: str) -> TimePlan:
    """A plan without times."""
    return TimePlan(
        step_s=None, steps=planned_steps(spec), duration_s=None, device_hours=None, response_tokens=None, basis=None, runs=[],
        text="", unknown=reason,
    )  # fmt: skip


def plan_time(
    spec: RunSpec, model: EstimateInputs, earlier: Sequence[EarlierRun], device: str
) -> tuple[TimePlan, SavingPlan | None]:
    """Step time, duration and device-hours, and what overlap saves; from comparable earlier runs if there are any."""
    estimate = estimate_step(spec, model, earlier)
    if estimate is None:
        return time_unknown(spec, f"the speed of {device} is not known, and no earlier run shows it"), None
    duration = planned_steps(spec) * estimate.step_s
    if spec.budget.max_hours is not None:
        duration = min(duration, 3600 * spec.budget.max_hours)
    time = TimePlan(
        step_s=estimate.step_s,
        steps=planned_steps(spec),
        duration_s=duration,
        device_hours=duration * spec.resources.devices / 3600,
        response_tokens=estimate.response,
        basis="earlier_runs" if estimate.runs else "simulated",
        runs=list(estimate.runs),
        text=_basis_text(len(estimate.runs), model.host),
        unknown="",
    )
    return time, plan_saving(spec, estimate, earlier, duration)


def _basis_text(runs: int, host: Host) -> str:
    if not runs:
        rates = "the rates of the device's data sheet" if host.gpu else "the speed of a typical CPU core"
        return f"simulated with {rates} and all responses at maximum length: no earlier run of this actor on this device"
    return f"from {runs} earlier run{'s' if runs > 1 else ''} of this actor on this device"


def plan_start(spec: RunSpec, cluster: ClusterView, team_id: int | None) -> StartPlan:
    """The start that the scheduler would predict."""
    if team_id is None:
        return StartPlan(at=None, text="", sooner="", unknown="only members who may submit to the project see the start")
    start = predict_start(spec, node_requirements(spec, cluster.offers), team_id, cluster.present)
    return StartPlan(at=iso(start.at) if start.at else None, text=start.text, sooner=start.sooner, unknown="")


def plan_saving(spec: RunSpec, estimate: StepEstimate, earlier: Sequence[EarlierRun], duration_s: float) -> SavingPlan | None:
    """What overlap saves: as measured in earlier runs with the same overlap, otherwise as simulated; None without overlap."""
    if (spec.overlap.intra_step, spec.overlap.inter_step) == ("off", "off"):
        return None
    same = [run for run in earlier if all(getattr(run.spec.overlap, mode) == getattr(spec.overlap, mode) for mode in PLAIN)]
    measured = [run.saved for run in same if run.saved is not None]
    ratio = median(measured) if measured else estimate.sequential_s / estimate.step_s - 1
    text = f"measured in {len(measured)} earlier run{'s' if len(measured) > 1 else ''}" if measured else "simulated"
    basis: Basis = "earlier_runs" if measured else "simulated"
    return SavingPlan(seconds=ratio * duration_s, share=ratio / (1 + ratio), basis=basis, text=text)

"""Whether a connected worker could run a spec, checked at submit. Pure: no database, no clock.

The platform cannot read workers' disks: it uses their catalogues.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from oppo_contract.model_folder import may_be_hub_id
from oppo_contract.presets import command_for
from oppo_contract.sections.models import hub_advice
from oppo_contract.sections.secrets import PREFIX, secret_names
from oppo_contract.spec import ModelSpec, RunSpec
from oppo_contract.spec_errors import SpecProblem, nearest_match

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's entry in a catalogue; empty or 0 if unknown."""

    task: str
    tokenizer_digest: str
    context: int
    vocab: int = 0
    weights: int = 0
    layers: int = 0
    width: int = 0
    cached: int = 0
    architecture: str = ""


@dataclass(frozen=True, slots=True)
class NodeOffer:
    """Resources of a connected node: devices by kind, usable models and prompts by id, and problems of the others by id.

    `device_model`, `device_memory`: driver's name of its devices and the memory of the smallest, bytes, by kind.
    """

    name: str
    devices: Mapping[str, int]
    models: Mapping[str, ModelFacts]
    prompts: frozenset[str]
    problems: Mapping[str, str] = field(default_factory=dict)
    hub: bool = False
    """Whether it downloads models by hub id."""
    rules: frozenset[str] | None = None
    """Names of the rules that its engine finds; None if it does not report them."""
    reward_hosts: frozenset[str] = frozenset()
    """Reward services that its operator allows, as `host` or `host:port`; reported with the rules."""
    cpus: int = 0
    device_model: Mapping[str, str] = field(default_factory=dict)
    device_memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequiredModel:
    """A model of the spec: the field's path, the id, its task, and whether it reads the actor's tokens."""

    path: str
    id: str
    task: str
    same_tokens: bool = True


def required_models(spec: RunSpec) -> list[RequiredModel]:
    """Models that come from a catalogue, the actor first; not built-in (`tiny`) models."""
    models = spec.models
    critic = models.critic if isinstance(models.critic, ModelSpec) else None
    roles = [
        ("models.actor", models.actor, "causal_lm", True),
        *((path, r.model, "sequence_classification", r.reads == "tokens") for path, r in models.reward.sources_by_path()),
        ("models.reference", models.reference, "causal_lm", True),
        ("models.critic", critic, "", True),
    ]
    return [RequiredModel(f"{path}.path", m.path, task, tokens) for path, m, task, tokens in roles if m is not None and m.path]


def required_files(spec: RunSpec) -> list[tuple[str, str]]:
    """Files of prompts and texts in the spec: the field's path and the id."""
    files = [("data.prompts", path) for path in spec.data.paths]
    if spec.evaluation is not None:
        files += [("evaluation.prompts", path) for path in spec.evaluation.paths]
    if spec.ppo.pretraining is not None:
        files.append(("ppo.pretraining.data", spec.ppo.pretraining.data))
    return files


def secret_problems(spec: RunSpec, known: Collection[str]) -> list[SpecProblem]:
    """A problem for each secret that the team does not have."""
    listed = (
        ", ".join(PREFIX + name for name in sorted(known)[:20])
        or "the team has no secrets yet; an owner adds them on the team's page"
    )
    reason = "names a secret that the team does not have"
    return [
        SpecProblem(f"secrets.{variable}", reason, PREFIX + name, listed, _near(name, known))
        for variable, name in secret_names(spec.secrets or {}).items()
        if name not in known
    ]


def _near(name: str, known: Collection[str]) -> str | None:
    close = nearest_match(name, sorted(known))
    return PREFIX + close if close else None


def find_problems(spec: RunSpec, offers: Sequence[NodeOffer], shared: bool = True) -> list[SpecProblem]:
    """Every reason why the connected workers could not run the spec; empty if they could.

    Args:
        spec: the spec to submit.
        offers: the workers' resources.
        shared: whether all of them keep checkpoints on a shared path.
    """
    problems = list(_bad_ids(spec))
    if spec.resources.nodes > 1 and not shared:
        reason = "needs storage shared by all nodes; an administrator sets OPPO_ARTIFACT_ROOT"
        problems.append(SpecProblem("resources.nodes", reason, str(spec.resources.nodes), "1"))
    if problems:
        return problems
    if not offers:
        return [SpecProblem("", "cannot be checked because no worker is connected; start a worker and submit again")]
    problems = [*_missing(spec, offers), *_unknown_rewards(spec, offers), *_unfit(spec, offers), *_too_large(spec, offers)]
    return problems or list(_scattered(spec, offers))


def _bad_ids(spec: RunSpec) -> Iterator[SpecProblem]:
    named = [(w.path, w.id) for w in required_models(spec)] + required_files(spec)
    for path, given in named:
        parts = given.split("/")
        if {"\\", "\0"} & {*given} or given.startswith("~") or PurePosixPath(given).is_absolute() or {"", ".", ".."} & {*parts}:
            yield SpecProblem(path, "is not inside a worker's folders", given, "an id from a worker's catalogue")


def _missing(spec: RunSpec, offers: Sequence[NodeOffer]) -> Iterator[SpecProblem]:
    models = sorted({name for offer in offers for name in offer.models})
    prompts = sorted({name for offer in offers for name in offer.prompts})
    problems = {name: problem for offer in offers for name, problem in offer.problems.items()}
    for required in required_models(spec):
        if required.id not in models and required.id not in hub_models(spec, offers):
            yield _unknown(required.path, required.id, models, "model", problems)
    for path, file in required_files(spec):
        if file not in prompts:
            yield _unknown(path, file, prompts, "prompts file", problems)


def required_rewards(spec: RunSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Rules, and reward services as `host:port`, by the path of their field."""
    sources = [(path.removesuffix(".model"), source) for path, source in spec.models.reward.sources_by_path()]
    rules = {f"{path}.rule": source.rule for path, source in sources if source.rule is not None}
    services = {f"{path}.http.url": host_port(source.http.url) for path, source in sources if source.http is not None}
    return rules, services


def host_port(url: str) -> str:
    """`host:port` of a reward service's URL."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{host}:{parts.port or DEFAULT_PORTS.get(parts.scheme, 443)}"


def allows_host(offer: NodeOffer, service: str) -> bool:
    """Whether the operator allows a reward service, `host:port`; an entry without a port allows 80 and 443."""
    host, _, port = service.rpartition(":")
    return service in offer.reward_hosts or (port in ("80", "443") and host in offer.reward_hosts)


def _unknown_rewards(spec: RunSpec, offers: Sequence[NodeOffer]) -> Iterator[SpecProblem]:
    """Rules that no worker has, and services that none may use, if all workers report theirs."""
    if any(offer.rules is None for offer in offers):
        return
    rules, services = required_rewards(spec)
    known = sorted({name for offer in offers for name in offer.rules or ()})
    for path, rule in rules.items():
        if rule not in known:
            reason = "is not registered on any connected worker; install the package that has it in the engine's environment"
            yield SpecProblem(path, reason, rule, "one of " + ", ".join(known[:20]) if known else "", nearest_match(rule, known))
    hosts = sorted({host for offer in offers for host in offer.reward_hosts})
    for path, service in services.items():
        if not any(allows_host(offer, service) for offer in offers):
            reason = f"is not allowed on any connected worker; its operator can allow it with OPPO_REWARD_HOSTS={service}"
            yield SpecProblem(path, reason, service, "one of " + ", ".join(hosts[:20]) if hosts else "")


def hub_models(spec: RunSpec, offers: Sequence[NodeOffer]) -> set[str]:
    """Models of the spec that are in no catalogue, and that a worker downloads from a hub."""
    if not any(offer.hub for offer in offers):
        return set()
    listed = {name for offer in offers for name in (*offer.models, *offer.problems)}
    ids = {required.id for required in required_models(spec)} - listed
    # The ids of examples look like those of a hub.
    return {name for name in ids if may_be_hub_id(name) and not command_for(name)}


def _unknown(path: str, given: str, known: list[str], noun: str, problems: Mapping[str, str]) -> SpecProblem:
    """Nothing usable has this id: not in any catalogue, or there with a problem."""
    allowed = ("one of " + ", ".join(known[:20])) if known else f"no connected worker has a {noun}"
    if given in problems:
        return SpecProblem(path, f"cannot be used: {problems[given]}", given, allowed)
    near = nearest_match(given, known)
    advice = hub_advice(given) if noun == "model" and near is None else ""
    if command := command_for(given):
        advice = f"; run `{command}` on a worker to make it"
    return SpecProblem(path, f"is not in any connected worker's catalogue of {noun}s{advice}", given, allowed, near)


def _unfit(spec: RunSpec, offers: Sequence[NodeOffer]) -> Iterator[SpecProblem]:
    known = {name: facts for offer in offers for name, facts in offer.models.items()}
    longest = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    for required in required_models(spec):
        facts = known.get(required.id)
        if facts is None:
            continue
        if required.task and facts.task and facts.task != required.task:
            yield SpecProblem(required.path, f"is a {facts.task} model", required.id, f"a {required.task} model")
        if required.same_tokens and facts.context and facts.context < longest:
            reason = f"has a context of {facts.context}, less than rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}"
            yield SpecProblem(required.path, reason, required.id, f"a context of {longest} or more")
    yield from _unknown_stops(spec, known.get(spec.models.actor.path or ""))
    yield from _other_tokenizer(spec, known)


def _unknown_stops(spec: RunSpec, actor: ModelFacts | None) -> Iterator[SpecProblem]:
    """Stop tokens that are not in the actor's vocabulary."""
    vocab = spec.models.actor.tiny.vocab if spec.models.actor.tiny is not None else actor.vocab if actor is not None else 0
    beyond = [token for token in spec.rollout.stop_tokens if vocab and token >= vocab]
    if beyond:
        reason = "contains tokens outside the actor's vocabulary"
        yield SpecProblem("rollout.stop_tokens", reason, str(beyond), f"token ids from 0 to {vocab - 1}")


def _other_tokenizer(spec: RunSpec, known: Mapping[str, ModelFacts]) -> Iterator[SpecProblem]:
    actor = known.get(spec.models.actor.path or "")
    for required in required_models(spec):
        facts = known.get(required.id)
        if not required.same_tokens or actor is None or facts is None or not actor.tokenizer_digest or not facts.tokenizer_digest:
            continue
        if facts.tokenizer_digest != actor.tokenizer_digest:
            reason = "has a different tokenizer than the actor, so it would read different text"
            yield SpecProblem(required.path, reason, required.id, f"a model with the tokenizer of {spec.models.actor.path}")


def _too_large(spec: RunSpec, offers: Sequence[NodeOffer], having: str = "") -> Iterator[SpecProblem]:
    """Too few devices on the nodes of `offers`; `having`: their common property."""
    most = max(count_devices(offer.devices, spec.device_kind) for offer in offers)
    kind = "" if spec.device_kind == "any" else f"{spec.device_kind} "
    if most == 0:
        yield SpecProblem("resources.kind", f"no connected worker{having} has a {kind}device", spec.resources.kind)
    elif spec.resources.nodes > 1:
        yield from _too_few_nodes(spec, offers, having)
    elif spec.resources.devices > most:
        reason = f"exceeds the {kind}devices of every connected worker{having}"
        yield SpecProblem("resources.devices", reason, str(spec.resources.devices), f"at most {most}")


def _too_few_nodes(spec: RunSpec, offers: Sequence[NodeOffer], having: str) -> Iterator[SpecProblem]:
    """A run on several nodes needs as many with its part of the devices, all of one kind."""
    part, required = spec.resources.devices // spec.resources.nodes, spec.device_kind
    kinds = {kind for offer in offers for kind in offer.devices} if required == "any" else {required}
    most = max((sum(offer.devices.get(kind, 0) >= part for offer in offers) for kind in kinds), default=0)
    if spec.resources.nodes > most:
        each = f"{part} {'' if required == 'any' else required + ' '}device{'s' if part > 1 else ''}"
        reason = f"exceeds the number of connected workers{having} with {each} each"
        yield SpecProblem("resources.nodes", reason, str(spec.resources.nodes), f"at most {most}")


def complete_offers(spec: RunSpec, offers: Sequence[NodeOffer]) -> list[NodeOffer]:
    """Those with all models, prompts and rewards of the spec, whatever their devices."""
    hub = hub_models(spec, offers)
    ids = {w.id for w in required_models(spec)} - hub
    files = {file for _, file in required_files(spec)}
    rules, services = required_rewards(spec)
    return [
        offer for offer in offers
        if ids <= offer.models.keys() and files <= offer.prompts and (offer.hub or not hub)
        and (offer.rules is None or ({*rules.values()} <= offer.rules and all(allows_host(offer, s) for s in services.values())))
    ]  # fmt: skip


def _scattered(spec: RunSpec, offers: Sequence[NodeOffer]) -> Iterator[SpecProblem]:
    whole = complete_offers(spec, offers)
    if not whole:
        yield SpecProblem("", "needs models, prompts and rewards that are on different workers; no single worker has them all")
    else:
        yield from _too_large(spec, whole, " holding the models and prompts")


def count_devices(devices: Mapping[str, int], kind: str) -> int:
    """Devices of a kind on a node; `any` means its most frequent kind, since a run never mixes kinds."""
    return max(devices.values(), default=0) if kind == "any" else devices.get(kind, 0)

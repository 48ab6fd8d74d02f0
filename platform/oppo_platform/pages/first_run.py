"""The checklist of an empty list of runs: what a first run needs, what of it is there, and whom to ask for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest

from oppo_platform.accounts.access import Action, administers, granting_roles, visible_teams
from oppo_platform.accounts.current_team import current_team
from oppo_platform.accounts.models import Membership, Role, User
from oppo_platform.pages.page_context import live_catalogue
from oppo_platform.pages.spec_form import Offer, example_runs, offer
from oppo_platform.projects.access import submit_projects
from oppo_platform.scheduling.nodes_overview import nodes_overview

MOST_NAMES = 3
DEVICE_WORDS = {"cpu": "CPU device", "cuda": "GPU"}


@dataclass(frozen=True, slots=True)
class Item:
    """One item of the checklist. `there`: what is there, empty if it lacks; `ask`: who can do it, empty if the user can."""

    key: str
    title: str
    there: str
    ask: str = ""


def checklist(nodes: Sequence[dict[str, Any]], offered: Offer, administrator: str, submitter: str) -> list[Item]:
    """What a run needs besides its submission.

    Args:
        nodes: those with a connection, as `nodes_overview` has them.
        administrator: who connects workers; empty if the user does.
        submitter: who works on workers' machines for the user; empty if the user may.
    """
    models = [entry.id for entry in offered.actors]
    prompts = [entry.id for entry in offered.prompts]
    rewards = [*(entry.id for entry in offered.rewards), *(f"rule {rule}" for rule in offered.rules)]
    return [
        Item("worker", "A worker is connected", shorten([_devices(node) for node in nodes], "; "), administrator),
        Item("model", "A language model to train", shorten(models), submitter),
        Item("prompts", "Prompts", shorten(prompts), submitter),
        Item("reward", "A reward: a model or a rule", shorten(rewards), submitter),
    ]


def _devices(node: dict[str, Any]) -> str:
    """`node-1, 1 CPU device`."""
    kinds = Counter(device["kind"] for device in node["devices"])
    counts = [f"{count} {DEVICE_WORDS[kind]}{'' if count == 1 else 's'}" for kind, count in sorted(kinds.items())]
    return ", ".join([node["name"], *(counts or ["no devices yet"])])


def shorten(names: Sequence[str], between: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return between.join([*names[:MOST_NAMES], *more])


def first_run_context(request: HttpRequest) -> dict[str, Any]:
    """The checklist for the user, with the examples of the submit form."""
    user = request.user
    catalogue = live_catalogue()
    nodes = [node for node in nodes_overview(user) if node["live"]]
    may_submit = submit_projects(user).exists()
    administrator = "" if administers(user) else _administrators(user)
    items = checklist(nodes, offer(catalogue), administrator, "" if may_submit else administrator)
    done = sum(bool(item.there) for item in items)
    return {
        "items": items,
        "done": done,
        "complete": done == len(items),
        "may_submit": may_submit,
        "administrator": administrator,
        "owner": "" if may_submit else _owners(request),
        "least_role": granting_roles(Action.SUBMIT)[0],
        "examples": example_runs(catalogue),
    }


def _administrators(user: User) -> str:
    """Cluster administrators; by name only those who share a team with the user."""
    colleagues = User.objects.filter(memberships__team__in=visible_teams(user)).distinct()
    names = colleagues.filter(is_staff=True, is_active=True).order_by("username").values_list("username", flat=True)
    return _with_names("a cluster administrator", list(names))


def _owners(request: HttpRequest) -> str:
    """Owners of the current team, or of all teams of the user."""
    team = current_team(request)
    teams = [team] if team else visible_teams(request.user)
    owners = Membership.objects.filter(team__in=teams, role=Role.OWNER, user__is_active=True).order_by("user__username")
    return _with_names("a team owner", list(dict.fromkeys(owners.values_list("user__username", flat=True))))


def _with_names(who: str, names: list[str]) -> str:
    return f"{who} ({shorten(names)})" if names else who

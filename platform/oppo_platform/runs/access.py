"""Permissions to see and manage runs, by the roles of `accounts.access`."""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import QuerySet

from oppo_platform.accounts.access import Action, memberships, permits, roles
from oppo_platform.accounts.models import User
from oppo_platform.runs.models import Run


def visible_runs(user: User, runs: QuerySet[Run] | None = None) -> QuerySet[Run]:
    """Those of `runs` (default: all) that belong to the user's teams, without those in the trash."""
    return (Run.objects.all() if runs is None else runs).filter(
        project__team_id__in=memberships(user).values("team_id"), deleted_at__isnull=True
    )


def trashed_runs(user: User) -> QuerySet[Run]:
    """Runs of the user's teams in the trash that can be restored."""
    teams = memberships(user).values("team_id")
    return Run.objects.filter(project__team_id__in=teams, deleted_at__isnull=False, purged_at__isnull=True)


def may_manage(user: User, run: Run) -> bool:
    """Maintainers manage (cancel, pause, resume, reprioritise) any run of the team, members their own."""
    return run.pk in manageable(user, [run])


def manageable(user: User, runs: Iterable[Run]) -> set[int]:
    """Those of `runs` (project joined) that the user may manage, with one query for all."""
    role_of = roles(user)
    result = ((run, role_of.get(run.project.team_id)) for run in runs)
    return {
        run.pk
        for run, role in result
        if permits(role, Action.STEER_ANY_RUN) or (permits(role, Action.SUBMIT) and run.user_id == user.pk)
    }

"""Folders of artifacts that are to be deleted: asked for in a transaction, deleted by whoever can reach them.

Where the artifacts' root is a folder of the platform's machine, the platform deletes. Where nodes have disks of their own, the
agent of each node that held the run is told with its heartbeats, deletes, and says so (`oppo_contract.wire`). A folder that is
not there counts as deleted, so asking more often than needed is harmless.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import structlog
from django.conf import settings
from django.db.models import Q, QuerySet

from oppo_contract import wire
from oppo_contract.safe_delete import OutsideRootError, delete_run_folder, file_url_path
from oppo_platform import clock
from oppo_platform.cluster.models import Node
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.models import Attempt, Checkpoint, Launch, Run
from oppo_platform.storage.models import FolderDeletion

AGAIN_S = 300.0
MOST_AT_ONCE = 20

log = structlog.get_logger(__name__)


def ask_for_run(run: Run) -> None:
    """Everything that the run has written. Inside the transaction that deletes it."""
    known = sum(Checkpoint.objects.filter(run=run).values_list("bytes", flat=True))
    ask(run, artifact_url(run.pk), known)


def ask(run: Run, url: str, size: int) -> None:
    """Have one folder of a run (project joined) deleted, `size` bytes as far as is known. Inside a transaction."""
    here = [None] if reachable() else []
    elsewhere = [] if settings.OPPO_ARTIFACTS_SHARED and here else _nodes_of(run)
    asked = {"team_id": run.project.team_id, "run_number": run.pk, "url": url, "bytes": size, "asked_at": clock.now()}
    FolderDeletion.objects.bulk_create(
        [FolderDeletion(node_id=node_id, **asked) for node_id in [*here, *elsewhere]], ignore_conflicts=True
    )


def reachable() -> bool:
    """Whether the artifacts' root is a folder of this machine."""
    try:
        return file_url_path(settings.OPPO_ARTIFACT_ROOT).is_dir()
    except OutsideRootError:
        return False


def _nodes_of(run: Run) -> list[int]:
    heads = Attempt.objects.filter(run=run, claimed_at__isnull=False).values("node")
    others = Launch.objects.filter(attempt__run=run, claimed_at__isnull=False).values("node")
    return list(Node.objects.filter(Q(pk__in=heads) | Q(pk__in=others)).order_by("pk").values_list("pk", flat=True))


def delete_here() -> int:
    """Delete what the platform itself can reach. Returns how many folders are done. Outside transactions: it takes time."""
    if not reachable():
        return 0
    done = 0
    for row in list(_due(FolderDeletion.objects.filter(node=None))[:MOST_AT_ONCE]):
        try:
            delete_run_folder(settings.OPPO_ARTIFACT_ROOT, row.run_number, row.url)
        except (OutsideRootError, OSError) as error:
            log.warning("folder_not_deleted", run=row.run_number, url=row.url, error=str(error))
            again = clock.now() + timedelta(seconds=AGAIN_S)
            FolderDeletion.objects.filter(pk=row.pk).update(error=str(error)[:500], not_before=again)
        else:
            done += FolderDeletion.objects.filter(pk=row.pk).delete()[0]
    return done


def orders_for(node: Node) -> list[wire.DeletionOrder]:
    """What the node's agent should delete now."""
    rows = _due(FolderDeletion.objects.filter(node=node))[:MOST_AT_ONCE]
    return [wire.DeletionOrder(id=row.pk, run_id=row.run_number, url=row.url) for row in rows]


def confirm(node: Node, told: Iterable[wire.DeletionResult]) -> None:
    """Note what the node's agent has deleted, and what it could not. Inside the heartbeat's transaction."""
    again = clock.now() + timedelta(seconds=AGAIN_S)
    for each in told:
        mine = FolderDeletion.objects.filter(pk=each.id, node=node)
        if each.error:
            mine.update(error=each.error[:500], not_before=again)
        else:
            mine.delete()


def _due(rows: QuerySet[FolderDeletion]) -> QuerySet[FolderDeletion]:
    return rows.filter(Q(not_before__isnull=True) | Q(not_before__lte=clock.now())).order_by("pk")

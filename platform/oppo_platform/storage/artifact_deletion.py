"""Deletion of artifact folders: requested in a transaction, carried out later on every machine with a copy.

The platform deletes folders below an artifact root on its own machine. For nodes with disks of their own, the agent of each node
that held the run receives deletion orders with its heartbeats, and reports results (`oppo_contract.wire`). A missing folder
counts as deleted, so repeated requests are harmless. While a run is retried its deletions wait, and one whose folder has become a
registered checkpoint again is withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import structlog
from django.conf import settings
from django.db.models import Exists, OuterRef, Q, QuerySet

from oppo_contract import wire
from oppo_contract.safe_delete import OutsideRootError, delete_run_folder, file_url_path
from oppo_contract.states import ENDED
from oppo_platform import clock
from oppo_platform.cluster.models import Node
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.models import Attempt, Checkpoint, Launch, Run
from oppo_platform.storage.models import FolderDeletion

RETRY_S = 300.0
BATCH = 20

log = structlog.get_logger(__name__)


def request_run_deletion(run: Run) -> None:
    """Request deletion of all artifacts of a run, inside the transaction that deletes the run."""
    size = sum(Checkpoint.objects.filter(run=run).values_list("bytes", flat=True))
    request_deletion(run, artifact_url(run.pk), size)


def request_deletion(run: Run, url: str, size: int) -> None:
    """Request deletion of one folder of a run (project joined), of about `size` bytes, inside a transaction."""
    here = [None] if _is_local_root() else []
    elsewhere = [] if settings.OPPO_ARTIFACTS_SHARED and here else _nodes_of(run)
    values = {"team_id": run.project.team_id, "run_number": run.pk, "url": url, "bytes": size, "asked_at": clock.now()}
    FolderDeletion.objects.bulk_create(
        [FolderDeletion(node_id=node_id, **values) for node_id in [*here, *elsewhere]], ignore_conflicts=True
    )


def _is_local_root() -> bool:
    """Whether the artifact root is a folder of this machine."""
    try:
        return file_url_path(settings.OPPO_ARTIFACT_ROOT).is_dir()
    except OutsideRootError:
        return False


def _nodes_of(run: Run) -> list[int]:
    heads = Attempt.objects.filter(run=run, claimed_at__isnull=False).values("node")
    others = Launch.objects.filter(attempt__run=run, claimed_at__isnull=False).values("node")
    return list(Node.objects.filter(Q(pk__in=heads) | Q(pk__in=others)).order_by("pk").values_list("pk", flat=True))


def delete_local_folders() -> int:
    """Delete due folders on this machine. Returns the number of deleted ones. Slow: call outside transactions."""
    FolderDeletion.objects.filter(_is_checkpoint()).delete()
    if not _is_local_root():
        return 0
    done = 0
    for row in list(_due(FolderDeletion.objects.filter(node=None))[:BATCH]):
        try:
            delete_run_folder(settings.OPPO_ARTIFACT_ROOT, row.run_number, row.url)
        except (OutsideRootError, OSError) as error:
            log.warning("folder_not_deleted", run=row.run_number, url=row.url, error=str(error))
            _record(FolderDeletion.objects.filter(pk=row.pk), str(error))
        else:
            done += FolderDeletion.objects.filter(pk=row.pk).delete()[0]
    return done


def deletion_orders(node: Node) -> list[wire.DeletionOrder]:
    """Due deletions for the node's agent."""
    rows = _due(FolderDeletion.objects.filter(node=node))[:BATCH]
    return [wire.DeletionOrder(id=row.pk, run_id=row.run_number, url=row.url) for row in rows]


def record_results(node: Node, results: Iterable[wire.DeletionResult]) -> None:
    """Record the deletions and failures of the node's agent, inside the heartbeat's transaction."""
    for result in results:
        _record(FolderDeletion.objects.filter(pk=result.id, node=node), result.error)


def _record(row: QuerySet[FolderDeletion], error: str) -> None:
    """Drop a completed deletion, or schedule the retry of a failed one."""
    if error:
        row.update(error=error[:500], not_before=clock.now() + timedelta(seconds=RETRY_S))
    else:
        row.delete()


def _due(rows: QuerySet[FolderDeletion]) -> QuerySet[FolderDeletion]:
    retried = Exists(Run.objects.filter(pk=OuterRef("run_number")).exclude(state__in=ENDED))
    now = Q(not_before__isnull=True) | Q(not_before__lte=clock.now())
    return rows.filter(now, ~retried, ~_is_checkpoint()).order_by("pk")


def _is_checkpoint() -> Exists:
    return Exists(Checkpoint.objects.filter(url=OuterRef("url")))

"""Celery consumer: receives `oppo.launch` on the node's queue and forwards it to the agent. `python -m worker consume`.

The reply to the next heartbeat lists the same attempts, so a lost, repeated or late message is harmless, and messages are
acknowledged early. Orders are written to an inherited pipe, because supervisors must be children of the agent: they outlive this
process.
"""

from __future__ import annotations

import os

from celery import Celery

from oppo_contract.lifeline import watch_lifeline
from worker.folders import NodeIdentity, WorkerFolder

LAUNCH_FD = "OPPO_LAUNCH_FD"
TASK = "oppo.launch"


def consumer_app(node: NodeIdentity, launch_fd: int) -> Celery:
    """The node's Celery app: one queue, one task, JSON only."""
    app = Celery("oppo-worker", broker=node.broker_url)
    app.conf.update(
        task_default_queue=node.queue,
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        broker_connection_retry=True,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={"socket_keepalive": True, "socket_connect_timeout": 5, "health_check_interval": 30},
    )

    @app.task(name=TASK)  # type: ignore[untyped-decorator]
    def launch(attempt_id: int, epoch: int) -> None:
        os.write(launch_fd, b"%d %d\n" % (int(attempt_id), int(epoch)))  # shorter than PIPE_BUF, so the write is atomic

    return app


def consume() -> int:
    """Main program of the consumer; ends with the agent. Returns the exit status."""
    watch_lifeline()
    node = WorkerFolder.from_environment().identity()
    if node is None:
        raise SystemExit("this node has not joined a platform: oppo worker join URL TOKEN")
    app = consumer_app(node, int(os.environ[LAUNCH_FD]))
    worker = app.Worker(
        pool="solo", concurrency=1, queues=[node.queue], without_gossip=True, without_mingle=True, without_heartbeat=True,
        loglevel="WARNING", hostname=f"oppo-{node.name}@{os.getpid()}",
    )  # fmt: skip
    worker.start()
    return int(worker.exitcode or 0)

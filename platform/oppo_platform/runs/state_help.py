"""Descriptions of an attempt's states and outcomes; docs/reference/states.md is generated from them."""

from __future__ import annotations

from oppo_platform.runs.models import AttemptState

A = AttemptState
ATTEMPT_STATES: dict[AttemptState, tuple[str, tuple[AttemptState, ...]]] = {
    A.ALLOCATED: ("devices are allocated; waiting for the node to claim the attempt", (A.CLAIMED, A.ENDED, A.FENCED)),
    A.CLAIMED: (
        "the node's supervisor has claimed it with a token and a lease; the engine is loading",
        (A.RUNNING, A.ENDED, A.FENCED),
    ),
    A.RUNNING: ("the engine is training", (A.ENDED, A.FENCED)),
    A.ENDED: ("the supervisor reported how the engine ended, or the attempt was never claimed", ()),
    A.FENCED: ("the platform gave it up; later reports of its engine are stored as history but change no state", ()),
}
OUTCOMES = {
    "succeeded": "all steps are done, or a budget limit was reached",
    "failed": "the engine ended with an error, or the run could not start because a secret or a checkpoint was missing",
    "cancelled": "cancelled",
    "paused": "paused, with a checkpoint",
    "preempted": "preempted or stopped by an orderly worker shutdown, with a checkpoint; or its worker lost contact with the"
    " platform and stopped it before the lease expired",
    "engine_died": "the engine ended without an error message",
    "node_failed": "its node ended it: a full disk, a killed supervisor, or SIGTERM while the engine started",
    "lease_lost": "its supervisor, or one on another node, sent no heartbeat until the lease expired",
    "orphaned": "its node is healthy and no longer reports it",
    "absent": "one of its other nodes did not claim its part in time, or stopped sending heartbeats before that",
    "restored": "the platform was restored from a backup made before its end",
    "unclaimed": "was withdrawn before a node claimed it; no progress was lost",
}

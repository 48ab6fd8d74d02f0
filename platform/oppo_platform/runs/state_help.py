"""What the states and outcomes of an attempt mean, for people; docs/reference/states.md is written from it."""

from __future__ import annotations

from oppo_platform.runs.models import AttemptState

A = AttemptState
ATTEMPT_STATES: dict[AttemptState, tuple[str, tuple[AttemptState, ...]]] = {
    A.ALLOCATED: ("has devices, and an order for its node to claim it", (A.CLAIMED, A.ENDED, A.FENCED)),
    A.CLAIMED: ("its node's supervisor has taken it, with a token and a lease; the engine loads", (A.RUNNING, A.ENDED, A.FENCED)),
    A.RUNNING: ("its engine has begun to train", (A.ENDED, A.FENCED)),
    A.ENDED: ("its supervisor has told how the engine ended, or nobody had claimed it yet", ()),
    A.FENCED: ("was given up; what its engine still tells counts as history, and moves nothing", ()),
}
OUTCOMES = {
    "succeeded": "all steps are done, or the budget is used up",
    "failed": "the engine named an error and ended; or the run could not be started, because a secret or a checkpoint was gone",
    "cancelled": "was asked to stop for good",
    "paused": "was asked to pause, and saved",
    "preempted": "was asked to make room, or its worker was shut down in good order, and saved; or its worker could not reach the"
    " platform and stopped it before its lease could end",
    "engine_died": "the engine ended without a word, or a disk of its node kept it from starting",
    "lease_lost": "its supervisor, or one on a further node, was silent until the lease ended",
    "orphaned": "its node is well and no longer reports it",
    "absent": "a further node of it did not claim its part in time, or fell silent before it had",
    "restored": "the platform was put back to a backup of before its end",
    "unclaimed": "was given up before anybody had claimed it; nothing was lost",
}

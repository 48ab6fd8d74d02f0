"""The states of a run and the allowed transitions. Only `oppo_platform.runs.transitions.move_run` changes a run's state."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """State of a run."""

    QUEUED = "queued"
    ALLOCATED = "allocated"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    PREEMPTING = "preempting"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


S = RunState
# Also the source of docs/reference/states.md.
STATE_DESCRIPTIONS: dict[RunState, str] = {
    S.QUEUED: "waiting for devices",
    S.ALLOCATED: "devices are allocated; the node has not claimed it yet",
    S.STARTING: "claimed; the engine is loading",
    S.RUNNING: "trains",
    S.PAUSING: "pause requested; the engine finishes its chunk and saves a checkpoint, including the unfinished step",
    S.PAUSED: "no devices; waits until it is resumed or cancelled",
    S.PREEMPTING: "being preempted; returns to the queue with a checkpoint",
    S.CANCELLING: "cancel requested",
    S.SUCCEEDED: "all steps done, or a budget limit reached",
    S.FAILED: "ended with an error, or failed more often than allowed; a user may retry it",
    S.CANCELLED: "cancelled by a user",
}
ENDED = frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLED})
# The run holds devices and has exactly one live attempt.
HOLDING_DEVICES = frozenset({S.ALLOCATED, S.STARTING, S.RUNNING, S.PAUSING, S.PREEMPTING, S.CANCELLING})

TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    S.QUEUED: frozenset({S.ALLOCATED, S.PAUSED, S.CANCELLED}),
    S.ALLOCATED: frozenset({S.STARTING, S.QUEUED, S.PAUSED, S.CANCELLING, S.CANCELLED, S.FAILED}),
    S.STARTING: frozenset({S.RUNNING, S.QUEUED, S.PAUSING, S.PREEMPTING, S.CANCELLING, S.SUCCEEDED, S.FAILED}),
    S.RUNNING: frozenset({S.QUEUED, S.PAUSING, S.PREEMPTING, S.CANCELLING, S.SUCCEEDED, S.FAILED}),
    # A stop request cannot be withdrawn: a run that is resumed while it is pausing returns to the queue, and vice versa.
    S.PAUSING: frozenset({S.PAUSED, S.QUEUED, S.PREEMPTING, S.CANCELLING, S.SUCCEEDED, S.FAILED}),
    S.PAUSED: frozenset({S.QUEUED, S.CANCELLED}),
    S.PREEMPTING: frozenset({S.QUEUED, S.PAUSING, S.CANCELLING, S.SUCCEEDED, S.FAILED}),
    # The engine may end before the cancel request reaches it.
    S.CANCELLING: frozenset({S.CANCELLED, S.SUCCEEDED, S.FAILED}),
    S.SUCCEEDED: frozenset(),
    S.FAILED: frozenset({S.QUEUED}),  # retried by a user, from its last checkpoint
    S.CANCELLED: frozenset(),
}


def can_transition(old: RunState, new: RunState) -> bool:
    """Whether the transition from `old` to `new` is allowed."""
    return new in TRANSITIONS[old]

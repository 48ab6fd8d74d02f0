"""What may be asked of a run in each state, and what it would do. Pure; the services are in `steering`."""

from __future__ import annotations

from typing import Literal

from oppo_contract.states import ENDED, RunState

Wish = Literal["pause", "resume", "cancel", "priority", "extend"]
S = RunState
SAVES = "The engine finishes its chunk, writes a checkpoint with the half-done step and frees the device; then the run"

# What happens, in a sentence; a state that is missing does not know the wish.
PAUSE: dict[RunState, str] = {
    S.QUEUED: "It leaves the queue until somebody resumes it; it then waits behind the others of its priority.",
    S.ALLOCATED: "Its node has not begun yet, so the device is free at once. It is held until somebody resumes it.",
    S.STARTING: "The engine is stopped while it loads. The run is held until somebody resumes it.",
    S.RUNNING: f"{SAVES} is held until somebody resumes it. It goes on with the very numbers that it would have had.",
    S.PREEMPTING: "It is saving to make room for others. Then it is held, instead of going back to the queue.",
}
RESUME: dict[RunState, str] = {
    S.PAUSED: "It goes to the queue, behind the others of its priority, and on from its checkpoint.",
    S.PAUSING: "The engine is stopping and cannot be asked back. Once it has, the run goes to its old place in the queue.",
}
CANCEL: dict[RunState, str] = {
    S.QUEUED: "It leaves the queue at once and cannot be continued.",
    S.PAUSED: "It ends at once and cannot be continued. Its curves, logs and checkpoints stay.",
    S.ALLOCATED: "Its node has not begun yet: it ends at once and the device is free.",
    S.STARTING: "The engine is stopped within seconds. The run cannot be continued.",
    S.RUNNING: "It stops within seconds and cannot be continued. Its curves, logs and checkpoints stay.",
    S.PAUSING: "It ends for good instead of being held, within seconds, whether its checkpoint is written or not.",
    S.PREEMPTING: "It ends for good instead of going back to the queue, within seconds.",
}
WAITING_PRIORITY = "It moves among the waiting runs of its team; higher goes first, 50 is usual."
LATER_PRIORITY = "It counts when the run waits again, and when the scheduler looks for runs to make room; higher goes first."
EXTEND = "It may hold devices for so much longer, in all, before it is paused with a checkpoint."


def wishes(state: str, limited: bool) -> dict[Wish, str]:
    """What may be asked now, each with what it would do. `limited`: the run has a time limit that can be extended."""
    now = RunState(state)
    told: dict[Wish, str] = {}
    for wish, words in (("pause", PAUSE), ("resume", RESUME), ("cancel", CANCEL)):
        if now in words:
            told[wish] = words[now]  # type: ignore[index]  # the three words are wishes
    if now not in ENDED | {S.CANCELLING}:
        told["priority"] = WAITING_PRIORITY if now in (S.QUEUED, S.PAUSED) else LATER_PRIORITY
        if limited:
            told["extend"] = EXTEND
    return told


def refusal(wish: str, state: str) -> str:
    """Why a wish means nothing in a state."""
    if RunState(state) in ENDED:
        return f"The run has ended ({state}); there is nothing left to {wish}. Fork it to start another."
    if state == S.CANCELLING:
        return f"The run is being cancelled, which is final; it is too late to {wish} it."
    return f"A run that is {state} cannot be asked to {wish}."

"""Actions allowed in each state of a run, and their effects. Pure; the services are in `lifecycle`."""

from __future__ import annotations

from typing import Literal

from oppo_contract.states import ENDED, RunState

RunAction = Literal["pause", "resume", "retry", "cancel", "priority", "extend"]
S = RunState
SAVES = "The engine finishes its chunk, saves a checkpoint of the unfinished step and releases the devices. The run"

# Effects as sentences; an action is not allowed in the states that are missing.
PAUSE: dict[RunState, str] = {
    S.QUEUED: "The run leaves the queue until it is resumed. It then waits behind other runs of its priority.",
    S.ALLOCATED: "The node has not started it yet: its devices are released immediately. The run is paused until resumed.",
    S.STARTING: "The engine is stopped while loading. The run stays paused until it is resumed.",
    S.RUNNING: f"{SAVES} stays paused until it is resumed. Resuming reproduces the same results.",
    S.PREEMPTING: "The run is being preempted and saves a checkpoint. It is then paused instead of returning to the queue.",
}
RESUME: dict[RunState, str] = {
    S.PAUSED: "The run is queued behind other runs of its priority and resumes from its checkpoint.",
    S.PAUSING: "The engine is already stopping. Afterwards the run returns to its previous place in the queue.",
}
CANCEL: dict[RunState, str] = {
    S.QUEUED: "The run leaves the queue immediately and cannot be resumed.",
    S.PAUSED: "The run ends immediately and cannot be resumed. Its curves, logs and checkpoints are kept.",
    S.ALLOCATED: "The node has not started it yet: the run ends immediately and its devices are released.",
    S.STARTING: "The engine stops within seconds. The run cannot be resumed.",
    S.RUNNING: "The run stops within seconds and cannot be resumed. Its curves, logs and checkpoints are kept.",
    S.PAUSING: "The run ends within seconds instead of being paused, even if its checkpoint is not complete.",
    S.PREEMPTING: "The run ends within seconds instead of returning to the queue.",
}
WAITING_PRIORITY = "Priority orders the waiting runs of a team; higher runs first, the default is 50."
LATER_PRIORITY = "Priority applies when the run waits again and when the scheduler selects runs to preempt; higher runs first."
EXTEND = "Adds to the run's total time limit. At the limit the run is paused with a checkpoint."


def allowed_actions(state: str, limited: bool, saved_step: int | None = None) -> dict[RunAction, str]:
    """Actions allowed now, each with its effect.

    `limited`: the run has a time limit that can be extended. `saved_step`: of its last checkpoint.
    """
    now = RunState(state)
    stops: dict[RunAction, dict[RunState, str]] = {"pause": PAUSE, "resume": RESUME, "cancel": CANCEL}
    described = {action: effects[now] for action, effects in stops.items() if now in effects}
    if now == S.FAILED:
        start = "restarts from step 0" if saved_step is None else f"resumes from step {saved_step}"
        described["retry"] = f"A retry queues this run again. It {start}; earlier failures no longer count."
    if now not in ENDED | {S.CANCELLING}:
        described["priority"] = WAITING_PRIORITY if now in (S.QUEUED, S.PAUSED) else LATER_PRIORITY
        if limited:
            described["extend"] = EXTEND
    return described


def refusal(action: str, state: str) -> str:
    """Why an action is not allowed in a state."""
    if RunState(state) in ENDED and action != "retry":
        return f"Cannot {action} a run that has ended ({state}). Fork it to start a new run."
    if state == S.CANCELLING:
        return f"Cannot {action} a run that is being cancelled."
    return f"Cannot {action} a run that is {state}."

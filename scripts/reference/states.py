"""docs/reference/states.md: states of runs and attempts and how attempts end, from the code's tables."""

from __future__ import annotations

from oppo_contract.states import HOLDING_DEVICES, STATE_DESCRIPTIONS, TRANSITIONS, RunState
from scripts.reference.markdown import WRITTEN, code, table

HEAD = f"""\
# States

{WRITTEN}, from `TRANSITIONS` in `oppo_contract/states.py` and `oppo_platform/runs/state_help.py`.

## A run

One function moves a run (`oppo_platform/runs/transitions.py`): by compare-and-set, only as this table allows, and with a row
that says why and by whom in the same transaction. What people may ask for, and when, is in [steering](../steering.md).

"""
AFTER = """
allocated, starting, running, pausing and preempting may return to the queue. A later wish turns pausing into preempting and
back, and all into cancelling. Whatever was asked of it, the engine may have been faster: pausing, preempting and cancelling
may also end in succeeded or failed.

## An attempt

A run has attempts, one at a time. Each has an epoch, a token and a lease of its own; what comes under an older epoch moves
nothing ([delivery](../delivery.md#one-engine-even-when-machines-fall-silent)). Engine death, a lost node and preemption end
an attempt and not the run.

"""
OUTCOMES = """
## How an attempt ends

What counts as a death is counted against `retries.attempts` ([steering](../steering.md#after-a-death)).

"""


def page() -> str:
    """The whole page as Markdown."""
    from oppo_platform.runs.retry_decision import DIED
    from oppo_platform.runs.state_help import ATTEMPT_STATES
    from oppo_platform.runs.state_help import OUTCOMES as MEANT

    runs = (
        (code(state), STATE_DESCRIPTIONS[state], _next(TRANSITIONS[state]), _word(state in HOLDING_DEVICES)) for state in RunState
    )
    attempts = ((code(state), meaning, _next(after)) for state, (meaning, after) in ATTEMPT_STATES.items())
    outcomes = ((code(outcome), meaning, _word(outcome in DIED)) for outcome, meaning in MEANT.items())
    return "".join(
        [
            HEAD, table(("state", "the run", "may become", "holds devices"), runs),
            AFTER, table(("state", "the attempt", "may become"), attempts),
            OUTCOMES, table(("outcome", "means", "a death"), outcomes),
        ]
    )  # fmt: skip


def _next(states: frozenset[str] | tuple[str, ...]) -> str:
    order = list(RunState) if isinstance(states, frozenset) else states
    return ", ".join(code(state) for state in order if state in states) or "nothing: it has ended"


def _word(holds: bool) -> str:
    return "yes" if holds else "no"

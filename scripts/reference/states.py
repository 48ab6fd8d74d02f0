"""docs/reference/states.md: states of runs and attempts, and outcomes of attempts."""

from __future__ import annotations

from oppo_contract.states import HOLDING_DEVICES, STATE_DESCRIPTIONS, TRANSITIONS, RunState
from scripts.reference.markdown import GENERATED, code, table

HEAD = f"""\
# States

{GENERATED} from `TRANSITIONS` in `oppo_contract/states.py` and `oppo_platform/runs/state_help.py`.

## A run

All transitions of a run go through `oppo_platform/runs/transitions.py`: compare-and-set, as this table allows, with a row for
reason and actor in the same transaction. [Steering](../steering.md) lists what users may request in each state.

"""
AFTER = """
A failed run returns to the queue when a user retries it ([steering](../steering.md#retry)).
allocated, starting, running, pausing and preempting may return to the queue. A later request changes pausing to preempting and
back, and any of them to cancelling. The engine may end before a request takes effect: pausing, preempting and cancelling may
also end in succeeded or failed.

## An attempt

A run has one attempt at a time. Each has an epoch, a token and a lease; requests with an older epoch have no effect
([delivery](../delivery.md#one-engine-per-attempt)). Engine death, a lost node and preemption end an attempt,
not the run.

"""
OUTCOMES = """
## How an attempt ends

A death counts against `retries.attempts` ([steering](../steering.md#after-a-death)).

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

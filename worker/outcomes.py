"""How an attempt ended, in the platform's words: a pure function of what was seen."""

from __future__ import annotations

from typing import Literal

from oppo_contract.events import FinishedEvent
from oppo_contract.wire import Outcome
from worker.folders import EngineEnd

REFUSED = 2  # the engine's exit status for a spec or command line that it does not take
MAX_REASON = 3900
LOST_OTHERS = "RankError:"  # how an engine's last reason begins when it lost those on other nodes
Word = Literal["succeeded", "failed", "cancelled", "paused", "preempted", "engine_died"]
STOPPED_FOR: dict[str | None, Word] = {"cancel": "cancelled", "pause": "paused", "preempt": "preempted"}


def outcome_of(
    epoch: int, end: EngineEnd | None, finished: FinishedEvent | None, last_lines: list[str], lost: str = ""
) -> Outcome:
    """The report of an attempt.

    Args:
        epoch: the attempt's.
        end: how the engine's process ended; None when its supervisor was killed before that.
        finished: the engine's last event, if it wrote one.
        last_lines: the end of its log.
        lost: what the platform cannot be told any more. Checkpoints are among it, so whatever was trained since does not count.
    """
    broken = bool(lost) and (finished is None or finished.outcome != "failed")
    word, reason = (_stopped(end), lost) if broken else _word_and_reason(end, finished, last_lines)
    code = end.exit_code if end is not None else None
    return Outcome(epoch=epoch, outcome=word, exit_code=code, reason=reason[:MAX_REASON], last_log_lines=last_lines)


def lost_others(finished: FinishedEvent | None) -> bool:
    """Whether an engine on one of several nodes ended because another one did, or was silent."""
    return finished is not None and finished.outcome == "failed" and finished.reason.startswith(LOST_OTHERS)


def _word_and_reason(end: EngineEnd | None, finished: FinishedEvent | None, last_lines: list[str]) -> tuple[Word, str]:
    if finished is not None and finished.outcome != "stopped" and not lost_others(finished):  # it was faster than any wish
        return finished.outcome, finished.reason
    if end is None:
        # Also when the engine was quick enough to save: a death counts, or a node that kills supervisors would go on for ever.
        saved = f"; it saved a checkpoint at step {finished.step}" if finished is not None else ""
        return "engine_died", f"the supervisor was killed, and the engine ended with it{saved}"
    if end.signal is not None:
        return STOPPED_FOR[end.signal], end.reason or (finished.reason if finished else f"ended on request to {end.signal}")
    if finished is not None and lost_others(finished):  # a death like any other, which need not be the end of the run
        return "engine_died", finished.reason
    if finished is not None and end.reason is None:  # one that was killed for a reason may have been quick enough to save
        return "preempted", f"the engine stopped at step {finished.step}: {finished.reason}"
    if end.exit_code == REFUSED:
        return "failed", end.reason or "the engine rejected the spec: " + " ".join(last_lines[-5:])
    return "engine_died", end.reason or _death(end.exit_code, last_lines)


def _stopped(end: EngineEnd | None) -> Word:
    """What an engine was stopped for; one that nobody had asked to has died."""
    return STOPPED_FOR.get(end.signal if end is not None else None, "engine_died")


def _death(exit_code: int, last_lines: list[str]) -> str:
    how = f"was killed by signal {exit_code - 128}" if exit_code > 128 else f"exited with status {exit_code}"
    said = f"; last log line: {last_lines[-1]}" if last_lines else ""
    return f"the engine {how} without finishing{said}"

"""Retries: what becomes of a run after each end, the rules on its last words, back-off, and excluded nodes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_contract.sections.run import LogRule, Retries
from oppo_contract.states import HOLDING_DEVICES, RunState, can_transition
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.models import Run
from oppo_platform.runs.retry_decision import (
    LONGEST_BACKOFF_S,
    NODE_FAILED,
    AttemptEnd,
    RetryPolicy,
    backoff_s,
    first_rule,
    verdict,
)

OUTCOMES = ("succeeded", "failed", "cancelled", "paused", "preempted", "engine_died", "node_failed", "lease_lost", "orphaned")
WITH_ENGINE = sorted(HOLDING_DEVICES - {RunState.ALLOCATED})
DEFAULT_RULES = tuple(Retries().rules)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def judged(outcome="engine_died", state="running", lines=(), reason="killed", deaths=1, **policy):
    told = RetryPolicy(**{"attempts": 3, "node_failures": 20, "backoff_s": 5.0, "rules": DEFAULT_RULES, **policy})
    return verdict(AttemptEnd(outcome, reason, lines, deaths, -9), state, "Paused by ada.", told, "Resumes from step 40.")


@given(
    st.sampled_from(OUTCOMES), st.sampled_from(WITH_ENGINE), st.integers(0, 5), st.integers(1, 5),
    st.lists(st.sampled_from([OOM, ECC, "all is well"])),
)  # fmt: skip
@settings(deadline=None)
def test_every_verdict_is_a_lawful_move(outcome, state, deaths, attempts, lines):
    after = judged(outcome, state, lines, deaths=deaths, attempts=attempts)
    assert can_transition(RunState(state), after.state)
    assert after.why
    assert after.state != RunState.QUEUED or state not in (RunState.CANCELLING, RunState.PAUSING)
    assert after.wait_s == 0 or after.state == RunState.QUEUED


def test_out_of_memory_is_not_tried_again_and_says_so():
    after = judged(lines=["step 3", OOM])
    assert after.state == "failed"
    assert after.why == "The engine died (exit status -9): killed. Not retried: retry rule “out of memory”."


def test_a_memory_error_excludes_the_node_also_when_the_engine_could_name_it():
    for outcome in ("engine_died", "failed"):
        after = judged(outcome, reason=ECC)
        assert (after.state, after.exclude_node) == ("queued", True)
        assert "excludes that node" in after.why


def test_the_first_rule_that_matches_decides_and_retry_overrules_what_is_final():
    rules = (LogRule(match="NCCL * timeout", action="retry"), LogRule(match="*", action="fail"))
    lines = ["NCCL watchdog: collective operation TIMEOUT"]
    assert judged("failed", lines=lines, rules=rules).state == "queued"
    assert judged("engine_died", lines=["else"], rules=rules).state == "failed"
    assert judged("failed", lines=["else"], rules=()).state == "failed"
    assert judged("lease_lost", lines=[OOM]).state == "queued"  # nothing that it said ended it


@pytest.mark.parametrize(
    ("words", "line", "matches"),
    [
        ("out of memory", "CUDA Out Of Memory.", True),
        ("ECC", "an eccentric direction", False),
        ("ECC", "ecc: 3", True),
        ("exit*code 9", "exit with code 9", True),
        ("exit*code 9", "code 9 then exit", False),
        ("(a+)+$", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!", False),
        ("(a+)+$", "it said (a+)+$ here", True),
        (".", "any", False),
    ],
)
def test_words_are_looked_for_as_they_stand(words, line, matches):
    assert (first_rule([LogRule(match=words, action="fail")], [line]) is not None) == matches


def test_only_the_last_lines_and_the_beginning_of_each_are_looked_at():
    rule = [LogRule(match="needle", action="fail")]
    assert first_rule(rule, ["reason", "needle", *["hay"] * 50]) is None
    assert first_rule(rule, ["reason", "needle", *["hay"] * 49])
    assert first_rule(rule, ["x" * 3000 + " needle"]) is None


def test_the_wait_doubles_up_to_an_hour_and_is_no_nodes_fault():
    assert [backoff_s(5, n) for n in (1, 2, 3)] == [5, 10, 20]
    assert backoff_s(5, 1000) == LONGEST_BACKOFF_S
    assert judged(deaths=2).wait_s == 10
    assert judged("lease_lost").wait_s == judged("preempted").wait_s == 0


@pytest.mark.parametrize("outcome", NODE_FAILED)
def test_failures_of_nodes_have_a_limit_and_a_back_off_of_their_own(outcome):
    assert judged(outcome, deaths=19, attempts=1).state == "queued"
    last = judged(outcome, deaths=20, reason="The disk of /data is full.")
    assert last.state == "failed"
    assert last.why == "The disk of /data is full. 20 node failures without a new checkpoint; see OPPO_MAX_NODE_FAILURES."
    assert [judged(outcome, deaths=n).wait_s for n in (1, 2, 3, 4, 12)] == [0, 5, 10, 20, 600]
    assert (
        judged(outcome, deaths=3).why
        == "killed. Resumes from step 40. Waits 10 s after 3 node failures without a new checkpoint."
    )


def died(worker, attempt_id, epoch, *lines, outcome="engine_died"):
    told = {"epoch": epoch, "outcome": outcome, "reason": "killed", "last_log_lines": list(lines)}
    assert worker.attempt(attempt_id, "outcome", told).status_code == 200


def test_after_a_death_the_run_waits_before_it_is_placed_again(world):
    worker = world.worker()
    run, attempt_id = world.start(worker, retries={"backoff_s": 20, "attempts": 2})
    place = run.queued_at
    died(worker, attempt_id, 1)
    world.cycle()
    run.refresh_from_db()
    assert (run.state, run.queued_at) == ("queued", place)
    assert run.reason.endswith("Attempt 2 of 2 starts after 20 s.")
    world.clock.advance(20)
    worker.heartbeat()
    world.cycle()
    second = run.attempts.get(epoch=2)
    worker.claim(second.pk, 2)
    died(worker, second.pk, 2)
    run.refresh_from_db()
    assert (run.state, run.error) == ("failed", "The engine died: killed. No attempts left (2 of 2).")


def restart(world, worker, run, epoch):
    """Wait until the run may start again, and claim its next attempt."""
    world.clock.advance(600)
    worker.heartbeat()
    world.cycle()
    attempt = run.attempts.get(epoch=epoch)
    worker.claim(attempt.pk, epoch)
    return attempt


def test_failures_of_nodes_use_up_no_attempt(world, settings):
    """Three of its own and any number of the nodes', which are counted again from each attempt that saved a checkpoint."""
    settings.OPPO_MAX_NODE_FAILURES = 3
    worker = world.worker()
    run, attempt_id = world.start(worker, retries={"attempts": 2})
    saves = {4, 6}
    for epoch, outcome in enumerate(["node_failed", "node_failed", "engine_died", *["node_failed"] * 4], start=1):
        if epoch > 1:
            attempt_id = restart(world, worker, run, epoch).pk
        if epoch in saves:
            told = {
                "epoch": epoch,
                "step": epoch,
                "url": f"{artifact_url(run.pk)}/c/{epoch}",
                "manifest_sha256": "0" * 64,
                "bytes": 1,
            }
            assert worker.attempt(attempt_id, "checkpoints", told).status_code == 200
        died(worker, attempt_id, epoch, outcome=outcome)
        run.refresh_from_db()
        assert run.state == "queued", (epoch, run.reason)
    died(worker, restart(world, worker, run, 8).pk, 8, outcome="node_failed")
    run.refresh_from_db()
    assert (run.state, run.reason) == ("failed", "killed. 3 node failures without a new checkpoint; see OPPO_MAX_NODE_FAILURES.")


def test_the_end_of_a_run_of_before_the_rules_became_stricter_is_taken(world):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    Run.objects.filter(pk=run.pk).update(spec=run.spec | {"retries": {"attempts": "many", "of_before": 1}})
    died(worker, attempt_id, 1)
    run.refresh_from_db()
    assert run.state == "queued"


def test_a_node_that_a_rule_excludes_gets_the_run_no_more(world):
    world.worker("node2")
    worker = world.worker("node1")
    run = world.submit()
    world.cycle()
    first = run.attempts.select_related("node").get()
    other = {"node1": "node2", "node2": "node1"}[first.node.name]
    on = worker if first.node.name == "node1" else world.worker("node2")
    on.claim(first.pk)
    died(on, first.pk, 1, ECC)
    world.clock.advance(5)
    for name in ("node1", "node2"):
        world.worker(name)
    world.cycle()
    second = run.attempts.select_related("node").get(epoch=2)
    assert second.node.name == other
    Run.objects.filter(pk=run.pk).update(excluded_nodes=[first.node_id, second.node_id])
    again = world.submit()
    Run.objects.filter(pk=again.pk).update(excluded_nodes=[first.node_id, second.node_id])
    world.cycle()
    again.refresh_from_db()
    assert again.reason == "Its retry rules exclude all suitable nodes: node1, node2."


def test_deaths_of_supervisors_count(world):
    """Their engines may be quick enough to save, and are reported as dead all the same."""
    from oppo_contract.events import FinishedEvent
    from worker.outcomes import build_outcome

    saved = FinishedEvent(producer="engine", seq=1, time=0.0, outcome="stopped", step=3, reason="asked to stop")
    told = build_outcome(1, None, saved, [])
    assert (told.outcome, told.reason) == (
        "node_failed", "the supervisor was killed, and the engine ended with it; it saved a checkpoint at step 3",
    )  # fmt: skip

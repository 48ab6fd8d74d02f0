"""The queue against real PostgreSQL: quotas, room made for others, reasons, places and reservations, and its page."""

from __future__ import annotations

from datetime import timedelta

import pytest

from oppo_cli.scheduler_explain import explain
from oppo_platform.cluster.models import Pool
from oppo_platform.pages import views
from oppo_platform.runs.lifecycle import cancel_run
from oppo_platform.runs.models import Allocation, Run
from oppo_platform.runs.services import submit_run
from oppo_platform.scheduling import wait_reasons
from oppo_platform.scheduling.cycle import Kept, run_cycle
from oppo_platform.scheduling.models import BackfillTerm, Reservation, SchedulerBeat, WaitingReason
from oppo_platform.scheduling.quotas import set_quota
from oppo_platform.scheduling.selectors import queue_order, waiting_runs
from oppo_platform.scheduling.wait_reasons import read_reasons
from tests.web.conftest import tiny_spec


def states(*runs):
    """Their states now."""
    for run in runs:
        run.refresh_from_db()
    return [run.state for run in runs]


@pytest.fixture
def cluster(world):
    """Four GPUs; Letters owns three of them and may borrow one, Others own one and may borrow all."""
    world.node = world.worker("gpus", devices=4, kind="cuda")
    pool = Pool.objects.get()
    set_quota(world.team.pk, pool.pk, 3, 1)
    set_quota(world.other_team.pk, pool.pk, 1, None)
    return world


def queue(user):
    """All of their waiting runs."""
    standing = queue_order(user)
    return waiting_runs(standing, standing.ids)


def of_others(world):
    """A run of the other team."""
    from oppo_contract import load_spec

    return submit_run(world.people["eve"], world.other_project, load_spec(tiny_spec(name="theirs")))


def train(world, *runs):
    """Let placed runs train."""
    for run in runs:
        attempt = run.attempts.get(state="allocated")
        assert world.node.claim(attempt.pk, attempt.epoch).status_code == 200
        assert world.node.attempt(attempt.pk, "heartbeat", {"epoch": attempt.epoch, "running": True}).status_code == 200


def test_borrowed_devices_are_given_back(cluster):
    borrowed = [of_others(cluster) for _ in range(4)]
    cluster.cycle()
    assert states(*borrowed) == ["allocated"] * 4
    train(cluster, *borrowed)
    cluster.clock.advance(700)
    cluster.node.heartbeat(4, "cuda", [(run.attempts.get().pk, 1) for run in borrowed])
    mine = cluster.submit()
    result = cluster.cycle()
    assert result.preempted == 1
    assert sorted(states(*borrowed)) == ["preempting", "running", "running", "running"]
    reason = WaitingReason.objects.get(run=mine)
    assert reason.estimated_start is not None
    assert cluster.cycle().preempted == 0, "one is on its way already"
    assert Reservation.objects.get(run=mine).cleared, "and what it leaves is nobody else's"
    victim = next(run for run in borrowed if run.state == "preempting")
    assert "beyond its quota" in victim.reason
    attempt = victim.attempts.get()
    shown = {"epoch": 1, "outcome": "preempted", "exit_code": 5, "reason": "saved"}
    assert cluster.node.attempt(attempt.pk, "outcome", shown).status_code == 200
    cluster.cycle()
    assert states(mine, victim) == ["allocated", "queued"]
    assert not WaitingReason.objects.filter(run=mine).exists()


def test_no_team_exceeds_its_quota_and_cap(cluster):
    held = [of_others(cluster) for _ in range(1)] + [cluster.submit() for _ in range(6)]
    cluster.cycle()
    assert Allocation.objects.filter(released_at__isnull=True).count() == 4
    set_quota(cluster.team.pk, Pool.objects.get().pk, 1, 0)
    assert states(*held).count("allocated") == 4
    later = WaitingReason.objects.filter(run__project__team=cluster.team)
    assert later.count() == 3


def test_a_scheduler_alone_reads_stored_reasons_once(cluster, monkeypatch):
    reads = []
    monkeypatch.setattr(wait_reasons, "read_reasons", lambda: reads.append(1) or read_reasons())
    alone = Kept()
    for _ in range(6):
        cluster.submit()
        cluster.clock.advance(1)
        run_cycle(alone)
    assert len(reads) == 1
    assert set(SchedulerBeat.objects.get().order) == set(read_reasons())


def test_schedulers_that_take_turns_store_what_holds_now(cluster):
    """Each keeps what it stored in its own last cycle, which the other one has replaced."""
    one, other = Kept(), Kept()
    runs = [cluster.submit() for _ in range(6)]
    waiting = [run.pk for run in runs[4:]]
    run_cycle(one)
    urgent = cluster.submit(priority=90)
    cluster.clock.advance(1)
    run_cycle(other)
    assert SchedulerBeat.objects.get().order == [urgent.pk, *waiting]
    cancel_run(urgent.pk, "user:ada")
    cluster.clock.advance(1)
    run_cycle(one)
    assert SchedulerBeat.objects.get().order == waiting
    assert set(WaitingReason.objects.values_list("run_id", flat=True)) == set(waiting)


def test_places_and_reasons_are_written_when_they_change(cluster):
    runs = [cluster.submit() for _ in range(6)]
    cluster.cycle()
    assert states(*runs) == ["allocated"] * 4 + ["queued"] * 2
    assert SchedulerBeat.objects.get().order == [runs[4].pk, runs[5].pk]
    before = dict(WaitingReason.objects.values_list("run_id", "changed_at"))
    cursors = dict(Run.objects.values_list("pk", "cursor"))
    cluster.clock.advance(1)
    cluster.cycle()
    assert dict(WaitingReason.objects.values_list("run_id", "changed_at")) == before
    assert dict(Run.objects.values_list("pk", "cursor")) == cursors
    shown = queue(cluster.people["vic"])
    assert [(w["run"]["id"], w["place"], w["may_steer"]) for w in shown["items"]] == [
        (r.pk, n, False) for n, r in enumerate(runs[4:], 1)
    ]
    assert queue(cluster.people["eve"])["items"] == []
    assert queue(cluster.people["eve"])["waiting"] == 2


def test_a_blocked_gang_keeps_its_turn_and_a_short_run_passes(cluster):
    """Two of four devices are free: the gang of four reserves them, and only a run that will be off them in time may pass."""
    set_quota(cluster.team.pk, Pool.objects.get().pk, 4, None)
    first = [cluster.submit() for _ in range(2)]
    cluster.cycle()
    train(cluster, *first)
    Run.objects.filter(pk__in=[run.pk for run in first]).update(step=50, total_steps=100, elapsed_s=3600)
    gang = cluster.submit()
    Run.objects.filter(pk=gang.pk).update(devices=4, queued_at=cluster.clock.now() - timedelta(hours=1))
    unknown, short = cluster.submit(), cluster.submit()
    Run.objects.filter(pk=short.pk).update(max_runtime_s=600)
    cluster.cycle()
    assert states(gang, unknown, short) == ["queued", "queued", "allocated"]
    assert Reservation.objects.get().run == gang
    term = BackfillTerm.objects.get()
    assert term.for_run == gang
    assert term.until == pytest.approx(cluster.clock.now() + timedelta(hours=1), abs=timedelta(minutes=5))
    page = cluster.login("ada").get("/queue").content.decode()
    assert " reserved</span>" in page
    assert WaitingReason.objects.get(run=unknown).sooner in page.replace("&#x27;", "'")


def test_a_plan_is_explained_without_changing_anything(cluster, capsys):
    borrowed = [of_others(cluster) for _ in range(4)]
    explain(once=False)
    shown = capsys.readouterr().out
    assert states(*borrowed) == ["queued"] * 4
    assert "4 to start, 0 to stop, 0 to wait. Nothing was changed" in shown
    explain(once=True)
    assert states(*borrowed) == ["allocated"] * 4
    assert "Done: 4 started" in capsys.readouterr().out
    train(cluster, *borrowed)
    cluster.clock.advance(700)
    cluster.node.heartbeat(4, "cuda", [(run.attempts.get().pk, 1) for run in borrowed])
    mine = cluster.submit(name="mine too")
    explain(once=False)
    stop, wait = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[0] in ("stop", "wait")]
    assert (stop[:2], stop[3:5]) == (["stop", "reclaim"], ["theirs", "Others"])
    assert wait[:5] == ["wait", "preempting", str(mine.pk), "mine", "too"]
    assert states(*borrowed, mine) == ["running"] * 4 + ["queued"]


def test_a_long_queue_is_shown_from_its_front_and_goes_on_when_asked(cluster, monkeypatch):
    runs = [cluster.submit(name=f"waits-{number}") for number in range(5)]
    monkeypatch.setattr(views, "QUEUE_ROWS", 2)
    ada = cluster.login("ada")

    def shown(address):
        page = ada.get(address).content.decode()
        return [run.name for run in runs if f">{run.name}</a>" in page], page

    names, page = shown("/queue")
    assert names == ["waits-0", "waits-1"]
    assert '<span class="muted">5</span>' in page
    assert 'href="?first=4"' in page
    assert "part=1&amp;first=2" in page
    names, page = shown("/queue?first=6")
    assert (len(names), "?first=8" in page) == (5, False)
    assert ada.get("/queue?first=-1").status_code == 404

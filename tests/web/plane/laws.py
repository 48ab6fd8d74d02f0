"""What must hold after every step of the simulated control plane, and when it has come to rest."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import connection
from django.db.models import F

from oppo_contract.states import ENDED, HOLDING_DEVICES, RunState, can_transition
from oppo_platform.runs.models import Allocation, Attempt, Run
from oppo_platform.scheduling.models import SchedulerBeat, Usage
from oppo_platform.scheduling.policy.fair_share import decayed
from oppo_platform.scheduling.usage import decayed_seconds
from oppo_platform.scheduling.wait_reasons import read_reasons
from oppo_platform.scheduling.waiting_runs import WaitingRuns
from oppo_platform.telemetry.blocks import unpack_points
from oppo_platform.telemetry.models import HotPoints, LogLine, ProducerMark

if TYPE_CHECKING:
    from oppo_platform.scheduling.cycle import Kept
    from tests.web.plane.simulation import ControlPlane

# Why a run may still wait when everybody else has ended and every node is back.
FOR_EVER = {"too_large", "missing", "excluded", "quota_never"}

RUNS = """
    SELECT run.id, run.state, run.epochs, run.devices, attempt.nodes, run.reason, waiting.text, attempt.id, attempt.epoch,
           (SELECT count(*) FROM runs_attempt a WHERE a.run_id = run.id AND a.state IN ('allocated', 'claimed', 'running')),
           (SELECT count(*) FROM scheduling_allocation h WHERE h.attempt_id = attempt.id AND h.released_at IS NULL),
           (SELECT count(*) FROM runs_launch l WHERE l.attempt_id = attempt.id AND l.state <> 'ended')
      FROM runs_run run
      LEFT JOIN runs_attempt attempt ON attempt.run_id = run.id AND attempt.state IN ('allocated', 'claimed', 'running')
      LEFT JOIN scheduling_waitingreason waiting ON waiting.run_id = run.id
"""
# Every node of every attempt on several: the attempt itself is rank 0, its launches are the others.
LAUNCHES = """
    SELECT attempt.id, attempt.state, attempt.nodes, launch.rank, launch.node_id, launch.state, run.devices / attempt.nodes,
           (SELECT count(*) FROM scheduling_allocation h JOIN cluster_device d ON d.id = h.device_id
             WHERE h.attempt_id = attempt.id AND h.released_at IS NULL AND d.node_id = launch.node_id)
      FROM runs_attempt attempt
      JOIN runs_run run ON run.id = attempt.run_id
      JOIN (SELECT attempt_id, rank, node_id, state FROM runs_launch
            UNION ALL SELECT id, 0, node_id, state FROM runs_attempt) launch ON launch.attempt_id = attempt.id
     WHERE attempt.nodes > 1
     ORDER BY attempt.id, launch.rank
"""
DEVICES = """
    SELECT device.node_id, device.index, device.state, held.attempt_id, coalesce(launch.state, attempt.state)
      FROM cluster_device device
      LEFT JOIN scheduling_allocation held ON held.device_id = device.id AND held.released_at IS NULL
      LEFT JOIN runs_attempt attempt ON attempt.id = held.attempt_id
      LEFT JOIN runs_launch launch ON launch.attempt_id = held.attempt_id AND launch.node_id = device.node_id
"""
MOVES = "SELECT id, run_id, old, new, reason FROM runs_transition WHERE id > %s ORDER BY id"
LIVE = ("allocated", "claimed", "running")


class Laws:
    """Looks at the database and at the simulated nodes. Raises AssertionError with what is broken."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.state_of: dict[int, str] = {}
        self.last_move = self._rows("SELECT coalesce(max(id), 0) FROM runs_transition")[0][0]
        self.looked_at: set[int] | None = None
        self._device_rows: list[tuple[Any, ...]] = []

    def cycle_begins(self) -> None:
        """What waits now has a reason after the cycle, if it still waits."""
        self.looked_at = {run_id for run_id, state in self.state_of.items() if state == RunState.QUEUED}

    def check(self, written: bool = True) -> None:
        """After every step; `written`: the database may have changed in it."""
        if written:
            self._moves()
            self._runs()
            if self.plane.spreads:
                self._launches()
            self._device_rows = self._rows(DEVICES)
        self._devices()

    def kept_is_what_is_stored(self, kept: Kept) -> None:
        """After a cycle: what the scheduler keeps equals what it would read now, and each run shows its stored reason."""
        kept_runs = copy.copy(kept.waiting).read()  # of a copy: the next cycle must see the same changes
        assert kept_runs == WaitingRuns().read()
        assert kept.stored is not None
        assert kept.stored.reasons == read_reasons()
        assert list(kept.stored.order) == SchedulerBeat.objects.get().order
        # A run that waits after a failure keeps that message.
        waiting = Run.objects.filter(state=RunState.QUEUED, waiting__isnull=False).exclude(waiting__code="backoff")
        assert not (others := waiting.exclude(reason=F("waiting__text")).values_list("id", "reason", "waiting__text")), others

    def _rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(sql, values)
            return list(cursor.fetchall())

    def _moves(self) -> None:
        """Only along the table, without a gap, and with a reason."""
        for number, run_id, old, new, reason in self._rows(MOVES, self.last_move):
            self.last_move = number
            assert self.state_of.get(run_id, "") == old, f"run {run_id} moved from {old}, but was {self.state_of.get(run_id)}"
            assert not old or can_transition(RunState(old), RunState(new)), f"run {run_id} moved from {old} to {new}"
            assert reason, f"run {run_id} became {new} without a reason"
            self.state_of[run_id] = new
            if self.looked_at is not None:
                self.looked_at.discard(run_id)
            self.plane.say(f"  run {run_id}: {old} → {new}: {reason}")

    def _runs(self) -> None:
        """At most one live attempt, the newest; devices are held by it, all of them, exactly in the states that hold some."""
        rows = self._rows(RUNS)
        for run_id, state, epochs, devices, nodes, reason, waiting, attempt_id, epoch, live, held, further in rows:
            assert state == self.state_of[run_id], f"run {run_id} became {state} without a transition"
            assert live <= 1, f"run {run_id} has {live} live attempts"
            assert (attempt_id is not None) == (state in HOLDING_DEVICES), f"run {run_id} is {state}, its attempt {attempt_id}"
            if attempt_id is not None:  # a further node that is done has given its devices back
                due = devices * (1 + further) // nodes
                assert (epoch, held) == (epochs, due), f"run {run_id}: epoch {epoch}, {held} devices instead of {due}"
            assert reason, f"run {run_id} is {state} without a reason"
            if self.looked_at is not None:
                assert waiting or run_id not in self.looked_at, f"run {run_id} waits and is not told why"
                assert not waiting or state == RunState.QUEUED, f"run {run_id} is {state} and told: {waiting}"
        self.looked_at = None

    def _launches(self) -> None:
        """Each node of an attempt has its part of the devices as long as it takes part, and none outlives the attempt."""
        places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        count = {}
        for attempt_id, attempt_state, nodes, rank, node_id, state, part, held in self._rows(LAUNCHES):
            what = f"rank {rank} of attempt {attempt_id} ({attempt_state}) is {state}"
            places[attempt_id].append((rank, node_id))
            count[attempt_id] = nodes
            assert state not in LIVE or attempt_state in LIVE, what
            assert state != "claimed" or attempt_state in ("claimed", "running"), what
            assert held == (part if state in LIVE else 0), f"{what}, with {held} devices of {part}"
        for attempt_id, found in places.items():
            assert [rank for rank, _ in found] == list(range(count[attempt_id])), f"attempt {attempt_id} has the ranks {found}"
            assert len({node_id for _, node_id in found}) == count[attempt_id], f"attempt {attempt_id} is on {found}"

    def _engines(self) -> dict[tuple[int, int], list[int]]:
        """The attempts whose engines live on each device. A rank of an attempt has one engine at most, wherever it is."""
        running: dict[tuple[int, int], list[int]] = defaultdict(list)
        ranks = set()
        for node in self.plane.nodes:
            for engine in node.engines:
                if engine.alive:
                    rank = (engine.attempt_id, engine.rank)
                    assert rank not in ranks, f"rank {engine.rank} of attempt {engine.attempt_id} has two engines"
                    ranks.add(rank)
                    for index in engine.devices:
                        running[node.node_id, index].append(engine.attempt_id)
        return running

    def _devices(self) -> None:
        """No device is held by what has ended, none runs two engines, and none that could be given away runs any."""
        running = self._engines()
        seen = set()
        for node_id, index, state, holder, attempt_state in self._device_rows:
            place = (node_id, index)
            engines = running.get(place, [])
            assert place not in seen, f"device {place} is held twice"
            seen.add(place)
            assert holder is None or attempt_state in LIVE, f"device {place} leaked: attempt {holder} is {attempt_state}"
            assert len(engines) <= 1, f"device {place} runs the engines of attempts {engines}"
            if state == "ready":
                allowed = [[], [holder]] if attempt_state in ("claimed", "running") else [[]]
                assert engines in allowed, f"device {place} is ready, held by {holder} ({attempt_state}), and runs {engines}"

    def at_rest(self) -> None:
        """When nothing moves any more."""
        self.check()
        for run in Run.objects.select_related("waiting"):
            calm = run.state in ENDED | {RunState.PAUSED}
            forever = run.state == RunState.QUEUED and run.waiting.code in FOR_EVER
            assert calm or forever, f"run {run.pk} is {run.state}: {run.reason}"
        assert not Allocation.objects.filter(released_at__isnull=True).exists(), "a device leaked"
        states = {state for _, _, state, _, _ in self._device_rows}
        assert states == {"ready"}, f"devices are {states}"
        for node in self.plane.nodes:
            assert not node.running(), f"{node.name} keeps {node.running()}"
            living = [(engine.attempt_id, engine.rank) for engine in node.engines if engine.alive]
            assert not living, f"{node.name} still runs the engines of (attempt, rank) {living}"
        self._telemetry()
        self._usage()

    def _telemetry(self) -> None:
        """What engines and supervisors wrote was applied once, in order, and to its end where the platform wanted it."""
        marks = {(m.attempt_id, m.producer): m.high_water for m in ProducerMark.objects.all()}
        lines, steps = defaultdict(list), defaultdict(list)
        for attempt_id, text in LogLine.objects.order_by("id").values_list("attempt_id", "text"):
            of_rank = re.match(r"\[node (\d+)\] ", text)  # what further nodes say is marked
            lines[attempt_id, int(of_rank[1]) if of_rank else 0].append(text[of_rank.end() :] if of_rank else text)
        hot = HotPoints.objects.filter(series__key="@wall").order_by("id")
        for attempt_id, data in hot.values_list("series__attempt_id", "data"):
            steps[attempt_id] += unpack_points(data)[0].tolist()
        for (attempt_id, _), files in self.plane.written.items():
            assert files.claim is not None
            meeting = files.claim.claimed.rendezvous
            rank = meeting.node_rank if meeting else 0
            what, mark = f"rank {rank} of attempt {attempt_id}", f"/{rank}" if rank else ""
            told = files.supervisor[: marks.get((attempt_id, f"supervisor{mark}"), 0)]
            assert lines[attempt_id, rank] == [line for event in told for line in event.lines], f"{what}: its log is {lines}"
            applied = files.engine[: marks.get((attempt_id, f"engine{mark}"), 0)]
            if rank == 0:
                assert steps[attempt_id] == [e.step for e in applied if e.kind == "step"], f"{what}: its steps"
            assert len(applied) == len(files.engine), f"{what}: {len(applied)} of {len(files.engine)} events arrived"
            assert len(told) == len(files.supervisor), f"{what}: its log is not complete"

    def _usage(self) -> None:
        """Every allocation was added to its team's use, once."""
        now, half_life = self.plane.clock.now(), settings.OPPO_USAGE_HALF_LIFE_S
        expected: dict[int, float] = defaultdict(float)
        for held in Allocation.objects.select_related("attempt__run__project"):
            assert held.settled, f"allocation {held.pk} was never settled"
            team = held.attempt.run.project.team_id
            expected[team] += decayed_seconds(
                held.created_at.timestamp(), held.released_at.timestamp(), now.timestamp(), half_life
            )
        used = {u.team_id: decayed(u.device_seconds, (now - u.at).total_seconds(), half_life) for u in Usage.objects.all()}
        for team, seconds in expected.items():
            assert abs(used[team] - seconds) <= 1e-6 * max(1.0, seconds), f"team {team} used {seconds}, told {used[team]}"
        assert not Attempt.objects.filter(state__in=LIVE).exists()

"""The control plane under a seed: real scheduler, services and ingest; simulated nodes, bus, calls and clocks.

Everything happens in steps of one virtual clock. A first part is wild: users with wishes, machines and processes that die, calls
and messages that get lost. Then it is let run quietly, until nothing moves. The laws are looked at after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

from django.conf import settings
from django.contrib.auth.hashers import make_password
from django.db import connection

from oppo_contract import load_spec
from oppo_contract.spec import RunSpec
from oppo_contract.states import RunState
from oppo_contract.wire import Rendezvous
from oppo_platform.accounts.models import Team, User
from oppo_platform.clock import ManualClock
from oppo_platform.cluster.models import Device, DeviceState, Pool
from oppo_platform.cluster.pools import drain, undrain
from oppo_platform.projects.models import Project
from oppo_platform.runs import lifecycle
from oppo_platform.runs.models import Allocation, Run
from oppo_platform.runs.retry import retry_run
from oppo_platform.runs.services import submit_run
from oppo_platform.scheduling.cycle import Kept, run_cycle
from oppo_platform.scheduling.quotas import set_quota, set_weight
from tests.web.plane.engines import LAST_WORDS, Files
from tests.web.plane.laws import FOR_EVER, Laws
from tests.web.plane.meetings import Meeting
from tests.web.plane.network import Agenda, Bus, Crash, Faults, Network, Writes, crashing
from tests.web.plane.nodes import SimulatedNode

# Seconds; the platform's own proportions, but for a lease that runs out within a simulation.
SETTINGS = {
    "OPPO_LEASE_S": 15.0,
    "OPPO_NODE_FRESH_S": 7.0,
    "OPPO_ORPHAN_GRACE_S": 6.0,
    "OPPO_RENDEZVOUS_S": 9.0,
    "OPPO_REDISPATCH_S": 6.0,
    "OPPO_STOP_DEADLINE_S": 8.0,
    "OPPO_CANCEL_DEADLINE_S": 3.0,
    "OPPO_MIN_RUNTIME_S": 5.0,
    "OPPO_SUBMIT_PENALTY_S": 10.0,
    "OPPO_USAGE_HALF_LIFE_S": 300.0,
}
WILD_S = 26.0
CYCLE_S = 2.0
REST_S = 400.0  # the quiet part takes no longer
LAST_STEPS = 30
MOST_STEPS = 3000
SPEC = load_spec(
    {
        "name": "simulated",
        "steps": 4,
        "models": {"actor": {"tiny": {"context": 1024}}, "reward": {"rule": "letters:score"}},
        "data": {"prompts": "letters"},
        "retries": {"backoff_s": 2.0},
    }
)


class ControlPlane:
    """One simulation. `run` raises AssertionError with the seed and the last steps when a law is broken."""

    def __init__(self, seed: int, clock: ManualClock, *, aloud: bool = False) -> None:
        self.seed, self.clock, self.aloud = seed, clock, aloud
        self.rng = Random(seed)
        self.agenda = Agenda(clock)
        self.log: list[str] = []
        self.steps = 0
        self.quiet = False
        self.gap_chance = 0.03
        self.faults = Faults()
        self.network = Network(self.agenda, self.rng, self.faults)
        self.bus = Bus(self.agenda, self.rng, self.faults)
        self.scheduler_back_at = 0.0
        self.kept = Kept()
        self.last_cycle_quiet = 0
        self.runs: list[int] = []
        self.projects: list[tuple[User, Project]] = []
        self.written: dict[tuple[int, int], Files] = {}  # by attempt and node
        self.meetings: dict[tuple[str, int], Meeting] = {}
        self.writes = Writes()
        self._found()
        self.nodes = [
            SimulatedNode(self, f"node{n}", self.rng.choice((1, 2, 2, 3))) for n in range(self.rng.choice((1, 2, 2, 3)))
        ]
        # Runs on several nodes need storage that all of them see.
        self.spreads = settings.OPPO_ARTIFACTS_SHARED and len(self.nodes) > 1
        self.laws = Laws(self)

    def say(self, text: str) -> None:
        """A line of what happened."""
        line = f"{self.steps:4} {self.agenda.now:7.2f} s  {text}"
        self.log.append(line)
        if self.aloud:
            print(line)

    def meeting_at(self, told: Rendezvous | None) -> Meeting | None:
        """Where the engines of an attempt on several nodes meet."""
        if told is None:
            return None
        place = (told.address.host, told.address.port)
        return self.meetings.setdefault(place, Meeting(self.agenda, self.rng, told.nodes))

    def run(self) -> None:
        """The wild part, the quiet part, and the laws all along."""
        try:
            with connection.execute_wrapper(self.writes):
                self._wild()
                self._calm()
            self.laws.at_rest()
        except Exception as error:
            last = "\n".join(self.log[-LAST_STEPS:])
            raise AssertionError(f"seed {self.seed}, step {self.steps}: {error!r}\nthe last steps:\n{last}") from error

    def _found(self) -> None:
        """Teams, and who submits for them."""
        for name in ("amber", "birch", "cedar")[: self.rng.choice((1, 2, 3))]:
            team = Team.objects.create(name=name, created_at=self.clock.now())
            user = User.objects.create(username=name, email=f"{name}@example.org", password=make_password(None))
            self.projects.append((user, Project.objects.create(team=team, name="p", created_at=self.clock.now())))

    def _wild(self) -> None:
        likely = self.rng.choice((0.0, 0.02, 0.08, 0.2))
        self.faults.lost = self.faults.reply_lost = self.faults.late = self.faults.twice = likely / 2
        self.faults.crash = likely / 4
        self.agenda.after(0.5, self._cycle)
        self.agenda.after(1.0, self._something_happens)
        for _ in range(self.rng.randint(1, 3)):
            self.agenda.after(self.rng.uniform(0.1, 3.0), self.submit)
        while self.agenda.now < WILD_S:
            self._step()

    def _calm(self) -> None:
        """No more faults and wishes; machines, network and drained nodes come back."""
        self.say("from here on it is quiet")
        self.quiet, self.gap_chance = True, 0.0
        self.faults.lost = self.faults.reply_lost = self.faults.late = self.faults.twice = self.faults.crash = 0.0
        self.network.down = self.bus.down = False
        self.scheduler_back_at = 0.0
        for node in self.nodes:
            node.cut_until, node.hidden = 0.0, set()
            undrain(node.node_id)
        while not self._rests():
            assert self.agenda.now < WILD_S + REST_S, "it does not come to rest"
            self._step()

    def _rests(self) -> bool:
        """Nothing is left on the nodes, every device is in order, and cycles have found nothing to do."""
        return self.last_cycle_quiet >= 2 and not any(node.running() for node in self.nodes)

    def _step(self) -> None:
        self.steps += 1
        assert self.steps < MOST_STEPS, "it goes round and round"
        act = self.agenda.pop()
        before = len(self.log)
        act()
        if len(self.log) != before:  # otherwise nobody did anything but wait
            for node in self.nodes:
                self.written |= {(number, node.node_id): files for number, files in node.files.items() if files.claim}
        self.laws.check(self.writes.seen)
        self.writes.seen = False

    def _cycle(self) -> None:
        self.agenda.after(CYCLE_S * (1.5 if self.quiet else self.rng.choice((1.0, 1.0, 2.0))), self._cycle)
        if self.network.down or self.agenda.now < self.scheduler_back_at:
            return
        crash = self.rng.randint(1, 60) if self.rng.random() < self.faults.crash else None
        self.laws.cycle_begins()
        try:
            with crashing(crash):
                result = run_cycle(self.kept)
        except Crash:
            self.laws.looked_at, self.kept = None, Kept()
            self.say("the scheduler dies in the middle of a cycle")
            return
        assert result is not None
        self.laws.kept_is_what_is_stored(self.kept)
        self.say(f"cycle: {result.counts()}")
        still = not (result.placed or result.preempted or result.fenced)
        unclear = Device.objects.exclude(state=DeviceState.READY).exists() or Allocation.objects.filter(settled=False).exists()
        later = Run.objects.filter(state=RunState.QUEUED).exclude(waiting__code__in=FOR_EVER).exists()
        self.last_cycle_quiet = self.last_cycle_quiet + 1 if self.quiet and still and not unclear and not later else 0

    def _something_happens(self) -> None:
        if self.quiet:
            return
        self.agenda.after(self.rng.expovariate(1.1), self._something_happens)
        happenings: list[tuple[int, Callable[[], None]]] = [
            (10, self.submit),
            (10, self._wish),
            (6, self._engine_dies),
            (4, self._supervisor_killed),
            (6, self._supervisor_frozen),
            (3, self._node_cut_off),
            (2, self._agent_restarts),
            (2, self._machine_restarts),
            (2, self._device_flickers),
            (3, self._drain),
            (2, self._quota),
            (2, self._bus_down),
            (1, self._platform_down),
            (1, self._scheduler_stops),
        ]
        self.rng.choices([act for _, act in happenings], [weight for weight, _ in happenings])[0]()

    def submit(self) -> None:
        """Somebody submits a run; now and then one that is too large, or needs what no node has."""
        if self.quiet or self.network.down:
            return
        user, project = self.rng.choice(self.projects)
        run = submit_run(user, project, self._spec())
        self.runs.append(run.pk)
        nodes = f" of {run.needs['nodes']} nodes" if run.needs["nodes"] > 1 else ""
        self.say(f"{user} submits run {run.pk} on {run.devices} devices{nodes}, priority {run.priority}")

    def _spec(self) -> RunSpec:
        rng = self.rng
        devices = rng.choices((1, 2, 3, 9), (8, 5, 1, 1))[0]
        nodes = rng.choices((1, 2, 3), (6, 4, 1))[0] if self.spreads else 1
        devices = devices if nodes == 1 else nodes * rng.choice((1, 1, 2))
        hours = rng.choice((None, None, None, 0.002))
        prompts = "elsewhere" if rng.random() < 0.04 else "letters"
        return SPEC.model_copy(
            update={
                "steps": rng.choice((2, 5, 8, 20)),
                "resources": SPEC.resources.model_copy(update={"devices": devices, "nodes": nodes}),
                "data": SPEC.data.model_copy(update={"prompts": prompts}),
                "queue": SPEC.queue.model_copy(
                    update={
                        "priority": rng.choice((10, 50, 50, 90)),
                        "preemptible": rng.random() < 0.8,
                        "max_runtime_hours": hours,
                    }
                ),
            }
        )

    def _wish(self) -> None:
        """Somebody wants something of a run, at whatever moment of its life."""
        if not self.runs or self.network.down:
            return
        run_id, actor = self.rng.choice(self.runs), "user:amber"
        wishes: dict[str, Callable[[], object]] = {
            "cancel": lambda: lifecycle.cancel_run(run_id, actor),
            "pause": lambda: lifecycle.pause_run(run_id, actor),
            "resume": lambda: lifecycle.resume_run(run_id, actor),
            "preempt": lambda: lifecycle.preempt_run(run_id, "An administrator wants room.", actor),
            "priority": lambda: lifecycle.set_priority(run_id, self.rng.randint(1, 99), actor),
            "retry": lambda: retry_run(run_id, actor),
            "extend": lambda: lifecycle.extend_run(run_id, 0.01, actor),
        }
        name = self.rng.choices(list(wishes), (2, 4, 5, 2, 2, 3, 1))[0]
        self.say(f"somebody wants to {name} run {run_id}")
        for _ in range(self.rng.choice((1, 1, 2))):  # an impatient finger
            with suppress(lifecycle.NotPossible):
                wishes[name]()

    def _engine_dies(self) -> None:
        living = [engine for node in self.nodes for engine in node.engines if engine.alive]
        if living:
            engine, words = self.rng.choice(living), self.rng.choice(list(LAST_WORDS))
            self.say(f"the engine of {engine.attempt_id} dies: {words!r}")
            engine.die(words)

    def _supervisor_killed(self) -> None:
        living = [supervisor for node in self.nodes for supervisor in node.supervisors.values()]
        if living:
            supervisor = self.rng.choice(living)
            self.say(f"the supervisor of {supervisor.attempt_id} is killed")
            supervisor.kill()

    def _supervisor_frozen(self) -> None:
        living = [supervisor for node in self.nodes for supervisor in node.supervisors.values()]
        if living:
            supervisor = self.rng.choice(living)
            seconds = self.rng.choice((4.0, 20.0, 30.0))
            self.say(f"the supervisor of {supervisor.attempt_id} is frozen for {seconds} s")
            supervisor.frozen_until = max(supervisor.frozen_until, self.agenda.now + seconds)

    def _node_cut_off(self) -> None:
        node, seconds = self.rng.choice(self.nodes), self.rng.choice((3.0, 10.0, 25.0))
        self.say(f"{node.name} is cut off for {seconds} s")
        node.cut_until = self.agenda.now + seconds

    def _agent_restarts(self) -> None:
        node = self.rng.choice(self.nodes)
        self.say(f"the agent of {node.name} restarts")
        node.restart_agent(self.rng.choice((1.0, 5.0, 15.0)))

    def _machine_restarts(self) -> None:
        node = self.rng.choice(self.nodes)
        self.say(f"{node.name} restarts")
        node.restart_machine(self.rng.choice((4.0, 10.0, 25.0)))

    def _device_flickers(self) -> None:
        node = self.rng.choice(self.nodes)
        node.hidden ^= {self.rng.randrange(node.device_count)}
        self.say(f"{node.name} does not see devices {sorted(node.hidden)}")

    def _drain(self) -> None:
        node = self.rng.choice(self.nodes)
        act = self.rng.choice((drain, undrain))
        self.say(f"{act.__name__} {node.name}")
        _ = drain(node.node_id, "maintenance") if act is drain else undrain(node.node_id)

    def _quota(self) -> None:
        pools = list(Pool.objects.order_by("pk"))
        if pools:
            _, project = self.rng.choice(self.projects)
            nominal, cap = self.rng.choice((0, 1, 2)), self.rng.choice((None, None, 0, 1))
            self.say(f"{project.team} has {nominal} devices and borrows {cap}")
            set_quota(project.team_id, self.rng.choice(pools).pk, nominal, cap)
            set_weight(project.team_id, self.rng.choice((0.5, 1.0, 3.0)))

    def _bus_down(self) -> None:
        self.bus.down = not self.bus.down
        self.say("the broker is down" if self.bus.down else "the broker is back")

    def _platform_down(self) -> None:
        seconds = self.rng.choice((5.0, 20.0))
        self.say(f"the platform is down for {seconds} s")
        self.network.down = True
        self.agenda.after(seconds, self._platform_back)

    def _platform_back(self) -> None:
        self.say("the platform is back")
        self.network.down = False

    def _scheduler_stops(self) -> None:
        seconds = self.rng.choice((5.0, 20.0))
        self.say(f"the scheduler stops for {seconds} s")
        self.scheduler_back_at = self.agenda.now + seconds

"""A run on two nodes, for the tests of launches."""

from oppo_platform.cluster.models import Device
from oppo_platform.runs.models import Allocation

ADDRESS = {"host": "10.0.0.1", "port": 29500}
TWO = {"nodes": 2, "devices": 2}


class Pair:
    """Two nodes and a run that is allocated on both."""

    def __init__(self, world, **changes):
        self.world = world
        self.workers = {name: world.worker(name) for name in ("a", "b")}
        self.run = world.submit(resources=TWO, **changes)
        world.cycle()
        self.attempt = self.run.attempts.get()
        self.head = self.workers[self.attempt.node.name]
        self.other = next(w for w in self.workers.values() if w is not self.head)

    def claim(self, worker, epoch=1, **more):
        reply = worker.post(f"attempts/{self.attempt.pk}/claim", {"epoch": epoch, "address": ADDRESS, **more}, worker.token)
        if reply.status_code == 200:
            worker.attempt_tokens[self.attempt.pk] = reply.json()["attempt_token"]
        return reply

    def claim_both(self):
        return [self.claim(worker).json() for worker in (self.head, self.other)]

    def beat(self, worker, running=True):
        return worker.attempt(self.attempt.pk, "heartbeat", {"epoch": 1, "running": running})

    def train(self):
        self.claim_both()
        assert self.beat(self.head).status_code == self.beat(self.other).status_code == 200

    def report(self, worker, outcome="engine_died", exit_code=1, **more):
        told = {"epoch": 1, "outcome": outcome, "exit_code": exit_code, "reason": "it was killed", **more}
        return worker.attempt(self.attempt.pk, "outcome", told)

    def states(self):
        """Of the run, the attempt and its launch."""
        self.run.refresh_from_db()
        self.attempt.refresh_from_db()
        return self.run.state, self.attempt.state, self.attempt.launches.get().state

    def device(self, worker):
        return Device.objects.get(node__name=worker.name).state

    def held(self):
        held = Allocation.objects.filter(released_at__isnull=True, attempt=self.attempt)
        return sorted(held.values_list("device__node__name", flat=True))

"""Simulated engines of one attempt on several nodes: they meet at the head's address, train in step and end together."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.web.plane.network import Agenda

if TYPE_CHECKING:
    from tests.web.plane.engines import Engine


class Meeting:
    """What torchrun and the ranks' common store do, seen from outside. Engines that never find each other wait in vain."""

    def __init__(self, agenda: Agenda, rng: Random, nodes: int) -> None:
        self.agenda, self.rng, self.nodes = agenda, rng, nodes
        self.ranks: dict[int, Engine] = {}
        self.met = False

    def join(self, engine: Engine) -> None:
        """An engine is loaded; with the last one all of them begin."""
        assert engine.rank not in self.ranks, f"rank {engine.rank} of attempt {engine.attempt_id} joins twice"
        self.ranks[engine.rank] = engine
        self.met = len(self.ranks) == self.nodes and all(each.alive for each in self.ranks.values())
        for each in self.ranks.values() if self.met else ():
            each.begin()

    def stop(self) -> None:
        """One was asked to stop, which is enough: they write the checkpoint together and leave."""
        within_s = self.rng.uniform(0.0, 2.5)
        for each in self.ranks.values():
            each.stopping = True
            self.agenda.after(within_s + self.rng.uniform(0.0, 0.5), each.leave_stopped)

    def all_done(self) -> None:
        """The head has trained its last step, and so have the others, who leave when they leave."""
        for each in self.ranks.values():
            each.stopping = True
            self.agenda.after(self.rng.uniform(0.0, 1.0), each.leave_done)

    def lost(self, gone: Engine) -> None:
        """One has died: the others notice within seconds."""
        for each in self.ranks.values() if self.met else ():
            if each is not gone and each.alive:
                self.agenda.after(self.rng.uniform(0.1, 4.0), each.lose_others)

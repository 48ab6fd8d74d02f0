"""The ledger that divides the update between the actor's process and its partner."""

from __future__ import annotations

import numpy as np

from oppo_core.rollout.sequence import Sequence
from oppo_core.update.work_split import CRITIC, SMALLEST_PASS_TOKENS, Costs, Ledger

COSTS = Costs(round_overhead=40.0, logits=0.5, whitens=True)


def answer(sequence_id: int, length: int) -> Sequence:
    """A finished answer."""
    sequence = Sequence(sequence_id, 0, np.zeros(2, dtype=np.int64), cohort=0)
    sequence.response += [1] * length
    sequence.finished = True
    return sequence


def cost(sequences: list[Sequence], actor: list[Sequence]) -> float:
    """What the partner does when it trains the critic on all and the actor on some."""
    return CRITIC * sum(s.length for s in sequences) + COSTS.early_actor * sum(s.length for s in actor)


def test_the_actor_is_trained_early_only_as_far_as_the_partner_is_done_before_the_next_chunk() -> None:
    ready = [answer(number, length) for number, length in enumerate([150, 80, 120, 300])]
    for rounds in range(1, 400, 13):
        ledger = Ledger()
        ledger.decoded(rounds, 4 * rounds, COSTS)
        ledger.partner_time = ledger.actor_time  # it has read everything
        found = ledger.affordable(ready, COSTS)
        assert not found or cost(ready, found) <= ledger.chunk_time
        assert not found or sum(s.length for s in found) >= SMALLEST_PASS_TOKENS
        longer = [s for s in ready if s not in found]
        if found and longer:
            assert max(s.length for s in found) <= min(s.length for s in longer)
            assert cost(ready, [*found, min(longer, key=lambda s: s.length)]) > ledger.chunk_time


def test_a_partner_that_is_behind_trains_no_actor_early() -> None:
    ledger = Ledger()
    ledger.decoded(400, 1600, COSTS)
    ledger.partner_time = ledger.actor_time + ledger.chunk_time
    assert ledger.affordable([answer(0, 150), answer(1, 80)], COSTS) == []


def test_with_room_for_all_all_are_taken_in_an_order_that_is_fixed() -> None:
    ledger = Ledger(actor_time=0.0, chunk_time=1e9)
    ready = [answer(7, 100), answer(3, 100), answer(5, 60)]
    assert [s.sequence_id for s in ledger.affordable(ready, COSTS)] == [5, 3, 7]

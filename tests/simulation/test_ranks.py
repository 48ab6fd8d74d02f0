"""Data-parallel ranks on virtual devices: who waits for whom, what sharded weights communicate, and the hand-over of new weights.

Costs in µs as in test_schedules.py: a decode round 1,000 and 100 a row; reading 50 a token and model; backward pass 100 a token.
Every device is a rank of its own with its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_contract.spec import load_spec
from oppo_core.engine.state import Engine
from oppo_core.rollout.sequence import Sequence
from oppo_core.simulation.assemble import MemoryJournal, assemble, steps_of
from oppo_core.simulation.machine import Machine
from oppo_core.simulation.rank_spans import split_span
from oppo_core.trace.recorder import Span, Wait
from oppo_estimate.devices import READING_ROLES, Decode, Devices, Ranks, load_devices
from oppo_estimate.schedules import variant

Virtual = Callable[..., Engine]
FSDP = {"training": {"backend": "fsdp2"}}
DEFER = {"inter_step": "defer"}
PER_CHUNK = {"intra_step": "per_chunk"}
# 1,000 bytes per µs within a node of two devices, 500 per µs between nodes.
LINKS = Ranks(per_node=2, node_bytes_s=1e9, network_bytes_s=5e8, collective_us=10)


def together(count: int, ranks: Ranks | None = None, **costs: Any) -> Devices:
    """`count` devices that do everything, each a rank; `costs`: of the machine `even`, by part, changed."""
    even = load_devices("even")
    parts = {name: getattr(even.costs, name).model_copy(update=fields) for name, fields in costs.items()}
    changes = {"actor": count, "groups": {}, "place": dict.fromkeys(READING_ROLES, "actor"), "ranks": ranks or Ranks()}
    return even.model_copy(update=changes | {"costs": even.costs.model_copy(update=parts)})


def windows(engine: Engine) -> list[float]:
    """Length of every step, µs."""
    return [step["timing_s/step"] * 1e6 for step in steps_of(engine)]


def ranks_of_batch(engine: Engine) -> list[int]:
    """The rank of each row of the last batch."""
    return engine.machine.batch_ranks  # type: ignore[attr-defined]


def test_a_step_takes_as_long_as_its_slowest_rank_and_the_other_waits(virtual: Virtual) -> None:
    engine = virtual({}, [3, 5], devices=together(2))
    # A row each. Rank 1 decodes 5 rounds and then has 6 tokens in every pass, rank 0 has 3 rounds and 4 tokens.
    assert windows(engine) == pytest.approx([5 * 1100 + 3 * 300 + 300 + 600 + 600])
    metrics = engine.journal.steps[0]  # type: ignore[attr-defined]
    waited = 2 * 1100 + (3 + 1 + 2 + 2) * 100
    assert metrics["idle_s/gpu:0/tail"] == pytest.approx(waited * 1e-6)
    assert (metrics["bubble/gpu:0"], metrics["bubble/gpu:1"]) == pytest.approx((waited / 7900, 0))
    assert metrics["timing_s/gen"] == pytest.approx(5500e-6), "phases last as long as on the slowest rank"
    assert metrics["overlap_factor"] == pytest.approx(1)


def test_equal_lengths_have_no_skew(virtual: Virtual) -> None:
    engine = virtual({}, [4], {"steps": 2, "ppo": {"batch_size": 6}}, devices=together(3))
    # Two rows a rank.
    assert windows(engine) == pytest.approx(2 * [4 * 1200 + 10 * (3 * 50 + 50 + 100 + 100)])
    assert all(step[f"bubble/gpu:{device}"] == 0 for step in steps_of(engine) for device in range(3))


@pytest.mark.parametrize("overlap", [{}, DEFER, PER_CHUNK, DEFER | PER_CHUNK])
def test_one_rank_is_what_it_was_without_ranks(overlap: dict[str, Any], virtual: Virtual, even: Callable[..., Devices]) -> None:
    changes = {"steps": 6, "overlap": {"max_age": 1}}
    ranked, plain = (
        list(steps_of(virtual(overlap, [3, 50, 4, 20, 6, 11], changes, devices=even(ranks=ranks)))) for ranks in (LINKS, None)
    )
    assert repr(ranked) == repr(plain)


def trained_ids(engine: Engine) -> list[list[int]]:
    """Trains all steps; the sequence_ids of every batch, in order."""
    batches, plain = list[list[int]](), engine.experience

    def experience(batch: list[Sequence], *rest: Any) -> Any:
        batches.append([s.sequence_id for s in batch])
        return plain(batch, *rest)

    engine.experience = experience
    list(steps_of(engine))
    return batches


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), count=st.integers(1, 5), batch=st.integers(1, 8),
    defers=st.booleans(), overcommit=st.integers(0, 4), group=st.integers(1, 3),
)  # fmt: skip
def test_ranks_share_the_work_and_add_none(
    lengths: list[int], count: int, batch: int, defers: bool, overcommit: int, group: int
) -> None:
    """Without costs of a round or a pass, the busy seconds of all ranks are those of one device that does everything."""
    overlap = {"intra_step": "off", "inter_step": "defer" if defers else "off"}
    delta = dict.fromkeys(("initial", "min", "max"), min(overcommit, batch))
    groups = {"group_size": group, "algorithm": "grpo" if group > 1 else "ppo"}
    spec = load_spec({
        "name": "shared", "steps": 4, "data": {"prompts": "none"}, "overlap": overlap | {"overcommit": delta},
        "models": {"actor": {"path": "none"}, "reward": {"model": {"path": "none"}}},
        "ppo": {"batch_size": batch, "epochs": 2, **groups},
        "rollout": {"max_new_tokens": 40, "max_prompt_tokens": 4}, "logging": {"samples_per_step": 0},
    })  # fmt: skip
    busy, trained = [], []
    for number in (1, count):
        devices = together(number, decode={"round_us": 0, "cached_token_us": 3})
        engine = assemble(spec, devices, lambda i: lengths[i % len(lengths)])
        trained.append(trained_ids(engine))
        steps = engine.journal.steps  # type: ignore[attr-defined]
        busy.append([sum(s[f"busy/{d}"] for d in devices.names) * s["timing_s/step"] for s in steps])
        assert all(s["timing_s/step"] >= work / number * (1 - 1e-9) for s, work in zip(steps, busy[-1], strict=True))
    assert busy[1] == pytest.approx(busy[0])
    assert [len(ids) for ids in trained[0]] == [batch * group] * 4
    assert trained[0] == trained[1], "ranks decide where rows are, never which"


@given(rows=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 500)), min_size=1, max_size=20), rounds=st.integers(1, 30))
def test_a_round_lasts_as_long_as_on_the_rank_with_most_work(rows: list[tuple[int, int]], rounds: int) -> None:
    devices = together(4, decode={"cached_token_us": 7})
    machine, alone = Machine(devices, False, 1000), Machine(together(1, decode={"cached_token_us": 7}), False, 1000)
    times = machine.decode_us(rounds, [tokens for _, tokens in rows], 0, [rank for rank, _ in rows])
    for rank in range(4):
        own = [tokens for place, tokens in rows if place == rank]
        assert times[rank] == pytest.approx(alone.decode_us(rounds, own, 0)[0] if own else 0)
    machine.work(times)
    assert machine.timeline() == pytest.approx(times.max() * 1e-6)
    assert machine.timeline() >= times.mean() * 1e-6 * (1 - 1e-9)


def test_padding_decodes_the_rows_that_a_rank_began_with() -> None:
    machine = Machine(together(2, decode={"round_us": 0, "row_us": 0, "cached_token_us": 1}).model_copy(update={"padded": True}),
                      False, 1000)  # fmt: skip
    # Rank 0 began with three rows, of which one is left; rank 1 with one.
    assert machine.decode_us(2, [5, 3], [3, 1], [0, 1]).tolist() == [3 * 5 + 3 * 6, 3 + 4]


def test_deferred_sequences_stay_on_their_rank_and_new_ones_go_to_the_least_loaded(virtual: Virtual) -> None:
    engine = virtual(DEFER, [3, 30, 4, 20, 6, 11, 25], {"steps": 8, "ppo": {"batch_size": 4}, "overlap": {"max_age": 3}},
                     devices=together(3))  # fmt: skip
    placed: dict[int, int | None] = {}
    for _ in steps_of(engine):
        for sequence in engine.pool.sequences:
            assert placed.setdefault(sequence.sequence_id, sequence.rank) == sequence.rank
            assert sequence.rank in (0, 1, 2)
    assert len(placed) > 5
    assert set(placed.values()) == {0, 1, 2}


def test_rows_are_balanced_unless_they_are_streamed_to_scorers_with_whole_weights(virtual: Virtual) -> None:
    four, lengths = {"ppo": {"batch_size": 4}, "models": {"reward": {"served_by": "vllm"}}}, [100, 1]
    apart = together(2).model_copy(update={"groups": {"scorers": 2}, "place": dict.fromkeys(READING_ROLES, "scorers")})
    reward = {"place": dict.fromkeys(READING_ROLES, "actor") | {"reward": "scorers"}}
    streamed, sequential = virtual(PER_CHUNK, lengths, four, devices=apart), virtual({}, lengths, four, devices=apart)
    sharded = virtual(PER_CHUNK, lengths, four, FSDP, devices=apart.model_copy(update=reward))
    for engine in (streamed, sequential, sharded):
        windows(engine)
    assert ranks_of_batch(streamed) == [0, 1, 0, 1], "as decoded: both long rows on rank 0"
    assert ranks_of_batch(sequential) == ranks_of_batch(sharded) == [0, 1, 1, 0]
    assert streamed.layout.streams
    assert sharded.layout.streams, "a served reward is streamed although the other models are sharded"


@pytest.mark.parametrize("overlap", [{}, {"intra_step": "per_sequence"}, PER_CHUNK, DEFER, DEFER | PER_CHUNK])
@pytest.mark.parametrize("scoring", [1, 2, 3])
def test_every_idle_second_of_a_rank_has_a_cause(overlap: dict[str, Any], scoring: int, virtual: Virtual) -> None:
    groups = {"groups": {"scorers": scoring}, "place": dict.fromkeys(READING_ROLES, "scorers")}
    devices = together(3, LINKS).model_copy(update=groups)
    engine = virtual(overlap, [3, 50, 4, 20, 6, 11], {"steps": 5, "ppo": {"batch_size": 4}}, devices=devices)
    for step in steps_of(engine):
        for device in devices.names:
            idle = {key: seconds for key, seconds in step.items() if key.startswith(f"idle_s/{device}/")}
            assert idle[f"idle_s/{device}/unknown"] == pytest.approx(0)
            assert sum(idle.values()) == pytest.approx(step[f"bubble/{device}"] * step["timing_s/step"])


def test_pieces_of_a_span_cover_it_and_each_device_works_its_share() -> None:
    span = Span(("a", "b", "c"), "actor", "decode", 10.0, 20.0, 3, 7)
    pieces, waits = split_span(span, [0.5, 0.8, 0.0])
    assert [(piece.devices, piece.start, piece.end) for piece in pieces] == [
        (("a", "b"), 10, 15), (("b",), 15, 18), ((), 18, 20)  # nobody: different ranks were the slowest in turn
    ]  # fmt: skip
    assert [piece.chunk for piece in pieces] == [3, 3, 0]
    assert sorted(waits) == [Wait(("a",), "tail", 15, 20), Wait(("b",), "tail", 18, 20), Wait(("c",), "tail", 10, 20)]
    assert split_span(span, [1.0, 1.0, 1.0]) == ([span], [])


def test_collectives_are_a_ring_whose_slower_link_decides() -> None:
    # Four devices on two nodes: each device lacks 3/4 of the bytes at 1,000 per µs, each node a half at 500.
    assert LINKS.collectives_us(4, 4000) == pytest.approx(10 + max(3, 4))
    assert LINKS.collectives_us(2, 4000, 5) == pytest.approx(5 * 10 + 2), "one node: nothing passes the network"
    assert LINKS.collectives_us(3, 3000) == pytest.approx(10 + max(2, 3)), "the second node has one device"
    assert LINKS.collectives_us(1, 4000, 5) == 0
    assert Ranks().collectives_us(64, 1e12, 5) == 0


def test_a_gathering_pass_takes_the_longer_of_both_and_a_unit_of_the_shorter() -> None:
    devices = together(2, LINKS, actor={"gathered_bytes": 100_000, "trained_bytes": 200_000, "units": 4, "pass_us": 7})
    costs = devices.costs.actor
    sharded, plain = (Machine(devices, False, 5, shards_weights=shards) for shards in (True, False))
    # Rank 0 has one pass of 4 tokens, rank 1 two of 6 together. Sharded, rank 0 makes a second, empty pass.
    assert plain.forward_us(costs, [[4], [6]]).tolist() == [7 + 200, 14 + 300]
    gathered = 2 * (50 + 4 * 10)
    assert sharded.forward_us(costs, [[4], [6]]) == pytest.approx([14 + 200 + gathered / 4, 14 + 300 + gathered / 4])
    moved = 2 * (150 + 8 * 10)
    assert sharded.backward_us(costs, [[4], [6]]) == pytest.approx([14 + 400 + moved / 4, 14 + 600 + moved / 4])
    # Communication decides where there is little to compute.
    assert sharded.forward_us(costs, [[1], []]) == pytest.approx([90 + 57 / 4, 90 + 57 / 4 - 50])
    assert sharded.prefill_us(costs, [[4], [6]]).tolist() == [7 + 200, 14 + 300], "the decoder's copy is whole"
    assert (sharded.reduce_us(costs), plain.reduce_us(costs)) == (0, 2 * (100 + 10))


def test_communication_adds_what_the_description_says(virtual: Virtual) -> None:
    costs = {"actor": {"gathered_bytes": 100_000, "trained_bytes": 200_000, "units": 4}}
    silent, linked = (windows(virtual({}, [3, 5], FSDP, devices=together(2, ranks, **costs)))[0] for ranks in (Ranks(), LINKS))
    # As without FSDP2, and one forward pass more of actor and critic: no graph is retained for the update.
    assert silent == pytest.approx(7900 + 2 * 300)
    rounds, hand_over = 5 * 10, 50 + 4 * 10
    actor = 2 * (50 + 40) / 4 + (150 + 80) / 4
    # The other models gather nothing, in one collective a pass and two a backward pass, and have one unit.
    others = 3 * 10 + 10 + 2 * 10
    assert linked - silent == pytest.approx(rounds + hand_over + actor + others)


def test_whole_weights_reduce_gradients_once_an_optimizer_step(virtual: Virtual) -> None:
    costs = {"actor": {"trained_bytes": 200_000}, "critic": {"trained_bytes": 50_000}}
    ppo = {"ppo": {"mini_batches": 2, "epochs": 3}}
    silent, linked = (windows(virtual({}, [3, 5], ppo, devices=together(2, ranks, **costs)))[0] for ranks in (Ranks(), LINKS))
    assert linked - silent == pytest.approx(5 * 10 + 2 * 3 * (2 * (100 + 10) + 2 * (25 + 10)))


@pytest.mark.parametrize(("backend", "hand_overs"), [({}, 0), (FSDP, 3)])
def test_new_weights_are_handed_over_once_a_ppo_step(backend: dict[str, Any], hand_overs: int, virtual: Virtual) -> None:
    devices = together(2, LINKS, actor={"gathered_bytes": 200_000, "units": 4})
    engine = virtual({}, [3, 5, 4], {"steps": 3, "ppo": {"mini_batches": 2, "epochs": 2}}, backend, devices=devices)
    list(steps_of(engine))
    assert isinstance(engine.journal, MemoryJournal)
    events = [payload for kind, payload in engine.journal.events if kind == "spans"]
    columns = ("phase", "start_s", "end_s")
    spans = {row for event in events for row in zip(*(event[name] for name in columns), strict=True) if row[0] == "weights"}
    assert len(spans) == hand_overs
    assert all(end - start == pytest.approx(140e-6, abs=2e-6) for _, start, end in spans)


def test_update_overlap_is_refused_on_ranks(small: Callable[..., Any]) -> None:
    from oppo_estimate.devices import DevicesError

    apart = together(2).model_copy(update={"groups": {"scorers": 2}, "place": dict.fromkeys(READING_ROLES, "scorers")})
    with pytest.raises(DevicesError, match="data-parallel ranks"):
        assemble(variant(small(), "both + update overlap"), apart)


def test_decode_costs_are_those_of_the_description() -> None:
    decode = Decode(round_us=1000, row_us=100, cached_token_us=2)
    devices = together(1, decode=decode.model_dump())
    # Two rounds over two rows with 8 cached tokens, then 10.
    assert devices.decode_us(1, 2, 2, 8) == 2 * 1200 + 2 * (8 + 10)

"""The plan, a pure function: law and reasons."""

from hypothesis import given
from hypothesis import strategies as st

from oppo_platform.scheduling.plan import DeviceView, NodeView, WaitingRun, make_plan


def node(number, free, busy=0, kind="cuda", offers=()):
    devices = [DeviceView(number * 100 + i, kind, i < free) for i in range(free + busy)]
    return NodeView(number, f"n{number}", tuple(devices), frozenset(offers))


def test_priority_goes_first_then_age():
    waiting = [WaitingRun(1, 0, 1), WaitingRun(2, 0, 1), WaitingRun(3, 5, 1)]
    plan = make_plan(waiting, [node(1, 2)])
    assert [placement.run_id for placement in plan.placements] == [3, 1]
    assert plan.reasons[2] == "Waits for 1 device: all 2 that would do are in use."


def test_a_run_gets_all_its_devices_on_one_node():
    plan = make_plan([WaitingRun(1, 0, 4)], [node(1, 3, 1), node(2, 3, 1)])
    assert plan.placements == []
    assert plan.reasons[1] == "Waits for 4 devices on one node: 6 of 8 are free, not enough together."


def test_small_runs_do_not_starve_a_large_one():
    plan = make_plan([WaitingRun(1, 0, 4), WaitingRun(2, 0, 1)], [node(1, 3, 1)])
    assert plan.placements == []
    assert plan.reasons[2] == "1 run in front of it waits for the same devices."


def test_a_blocked_run_holds_up_only_nodes_it_could_use():
    plan = make_plan([WaitingRun(1, 0, 4), WaitingRun(2, 0, 1)], [node(1, 3, 1), node(2, 1)])
    assert [(p.run_id, p.node_id) for p in plan.placements] == [(2, 2)]


def test_the_fullest_node_that_fits_is_taken():
    plan = make_plan([WaitingRun(1, 0, 2)], [node(1, 8), node(2, 2, 6)])
    assert plan.placements[0].node_id == 2


def test_reasons_for_what_cannot_start():
    needs = frozenset({("model", "m"), ("prompts", "p")})
    run = WaitingRun(1, 0, 1, needs=needs)
    assert make_plan([run], []).reasons[1] == "No worker is connected."
    assert make_plan([run], [node(1, 1)]).reasons[1] == "No connected worker has the model m."
    apart = [node(1, 1, offers=[("model", "m")]), node(2, 1, offers=[("prompts", "p")])]
    assert make_plan([run], apart).reasons[1] == "No single connected worker has all the models and prompts it needs."
    large = WaitingRun(1, 0, 9, kind="cuda")
    assert (
        make_plan([large], [node(1, 8)]).reasons[1]
        == "Needs 9 cuda devices on one node; the largest connected one that would do has 8."
    )
    away = WaitingRun(1, 0, 1, home=(7, "n7"))
    assert (
        make_plan([away], [node(1, 8)]).reasons[1]
        == "Its checkpoint lies on node n7, which is not connected; storage is not shared."
    )


def test_kinds_are_never_mixed():
    both = NodeView(1, "n1", (DeviceView(1, "cuda", True), DeviceView(2, "cpu", True)))
    assert make_plan([WaitingRun(1, 0, 2)], [both]).placements == []
    assert make_plan([WaitingRun(1, 0, 1)], [both]).placements[0].device_ids == (1,)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=12),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=5),
)
def test_every_run_is_placed_or_told_why_and_no_device_is_given_twice(runs, sizes):
    nodes = [node(i + 1, free, busy) for i, (free, busy) in enumerate(sizes)]
    waiting = [WaitingRun(i, priority, devices) for i, (priority, devices) in enumerate(runs)]
    plan = make_plan(waiting, nodes)
    placed = {placement.run_id: placement for placement in plan.placements}
    assert placed.keys() ^ plan.reasons.keys() == {run.run_id for run in waiting}
    given_away = [device for placement in plan.placements for device in placement.device_ids]
    assert len(given_away) == len(set(given_away))
    free = {d.device_id: n.node_id for n in nodes for d in n.devices if d.free}
    for run in waiting:
        if run.run_id in placed:
            assert [free[d] for d in placed[run.run_id].device_ids] == [placed[run.run_id].node_id] * run.devices

"""The scheduling policy by example: who starts, who makes room, and what the others are told."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from oppo_platform.scheduling import policy
from oppo_platform.scheduling.policy import Backfill, Quota, Reservation, Team, feasible_ever, placement, plan
from tests.simulation.policy_clusters import NEEDS, cluster, node, running, waiting


def placed(decisions):
    """Run ids in the order of their placements."""
    return [placement.run_id for placement in decisions.placements]


def why(decisions, run_id):
    """Code and text of a reason."""
    reason = decisions.reasons[run_id]
    return reason.code, reason.text


def test_within_a_team_priority_goes_first_then_age():
    made = plan(cluster([node(1, 2)], [waiting(1), waiting(2), waiting(3, priority=60)]), 0)
    assert placed(made) == [3, 1]
    assert why(made, 2) == ("devices", "Waits for 1 device: all 2 suitable ones are in use.")


def test_runs_that_no_node_can_take_come_last_in_the_order_of_their_team():
    absent = {"needs": frozenset({("model", "absent")})}
    never = [waiting(1, **absent), waiting(2, priority=60, **absent), waiting(3, team_id=2, **absent)]
    made = plan(cluster([node(1, 1, {0: 9})], [*never, waiting(4)], [running(9, 3, [100])]), 0)
    assert made.order == (4, 2, 1, 3)


def test_a_run_that_came_back_keeps_its_place():
    made = plan(cluster([node(1, 1)], [waiting(1, submitted_at=9.0), waiting(2, submitted_at=3.0)]), 0)
    assert placed(made) == [2]


def test_the_fullest_node_that_fits_is_taken():
    busy = [running(10, 1, [202, 203])]
    made = plan(cluster([node(1, 4), node(2, 4)], [waiting(1, devices=2)], busy), 0)
    assert made.placements[0].devices == {2: (200, 201)}


def test_kinds_are_never_mixed_and_gpus_come_first():
    both = [node(1, 1, kind="cpu"), node(2, 1, kind="cuda")]
    assert plan(cluster(both, [waiting(1)]), 0).placements[0].devices == {2: (200,)}
    assert why(plan(cluster(both, [waiting(1, devices=2, nodes_max=2)]), 0), 1)[0] == "too_large"


def test_a_gang_gets_whole_nodes_and_the_rest_on_one_more():
    busy = [running(10, 1, [203])]
    made = plan(cluster([node(1), node(2), node(3)], [waiting(1, devices=11, nodes_max=3)], busy), 0)
    assert made.placements[0].devices == {1: (100, 101, 102, 103), 3: (300, 301, 302, 303), 2: (200, 201, 202)}
    assert not plan(cluster([node(1), node(2), node(3)], [waiting(1, devices=11, nodes_max=2)], busy), 0).placements


def test_a_run_that_asks_for_nodes_gets_exactly_so_many_with_an_equal_part_on_each():
    nodes = [node(1), node(2), node(3)]
    made = plan(cluster(nodes, [waiting(1, devices=4, nodes=2)], [running(10, 1, [201])]), 0)
    assert made.placements[0].devices == {1: (100, 101), 2: (200, 202)}  # node 2 is the fullest that has two
    assert not plan(cluster([node(1, 8)], [waiting(1, devices=2, nodes=2)]), 0).placements
    mixed = [node(1, 1, kind="cpu"), node(2, 1, kind="cuda")]
    told = why(plan(cluster(mixed, [waiting(1, devices=2, nodes=2)]), 0), 1)
    assert told == ("too_large", "Needs 2 nodes with 1 device each; 1 connected node is suitable.")


def test_room_is_made_on_every_node_of_a_run_that_asks_for_nodes():
    busy = [running(10, 1, [100], priority=10), running(11, 1, [200], priority=10), running(12, 1, [300], preemptible=False)]
    made = plan(cluster([node(1, 1), node(2, 1), node(3, 1)], [waiting(1, devices=2, nodes=2)], busy), 0)
    assert sorted(p.run_id for p in made.preemptions) == [10, 11]
    assert [dict(r.devices) for r in made.reservations] == [{1: (100,), 2: (200,)}]


def test_a_reservation_of_a_run_that_asks_for_nodes_is_where_they_open_first():
    ends = {100: 50.0, 200: 90.0, 300: 70.0}
    busy = [running(10 + d, 2, [d], preemptible=False, expected_end=end) for d, end in ends.items()]
    made = plan(cluster([node(1, 1), node(2, 1), node(3, 1)], [waiting(1, devices=2, nodes=2)], busy), 0)
    assert [(dict(r.devices), r.start) for r in made.reservations] == [({1: (100,), 3: (300,)}, 70.0)]


def test_a_run_on_several_nodes_is_told_which_of_them_its_retry_rules_exclude():
    gone = waiting(1, devices=2, nodes=2, excluded_nodes=frozenset([1]))
    text = "Needs 2 nodes; its retry rules exclude n1, and too few other nodes are suitable."
    assert why(plan(cluster([node(1, 1), node(2, 1)], [gone]), 0), 1) == ("excluded", text)


def test_own_quota_goes_before_borrowed_and_then_the_lower_share():
    quotas = {2: Quota(1, None)}
    made = plan(cluster([node(1, 1)], [waiting(1, 1), waiting(2, 2)], quotas=quotas, usage={2: 1e6}), 0)
    assert placed(made) == [2]
    made = plan(cluster([node(1, 1)], [waiting(1, 1), waiting(2, 2)], usage={1: 1e6, 2: 1e3}), 0)
    assert placed(made) == [2]


def test_protection_doubles_after_a_preemption_with_the_reason_protected():
    busy = [
        running(10, 2, [100, 101], started_at=-1500.0, preempted=1),
        running(11, 2, [102, 103], started_at=-1500.0, preempted=2),
    ]
    queue = [waiting(1, 1, 2), waiting(2, 1, 2)]
    made = plan(cluster([node(1)], queue, busy, quotas={1: Quota(4)}), 0)
    assert [(p.run_id, p.for_run_id) for p in made.preemptions] == [(10, 1)]
    assert why(made, 2) == (
        "protected", "1 run of another team can be preempted once it has had its minimum runtime.",
    )  # fmt: skip
    assert made.reasons[2].estimated_start == 4 * 600 - 1500 + 60
    made = plan(cluster([node(1)], queue, busy, quotas={1: Quota(4)}), 900)
    assert [(p.run_id, p.for_run_id) for p in made.preemptions] == [(10, 1), (11, 2)]


def test_protection_ends_at_eight_times_the_minimum():
    busy = [running(10, 2, [100, 101, 102, 103], started_at=0.0, preempted=1000)]
    state = cluster([node(1)], [waiting(1, 1, 2)], busy, quotas={1: Quota(4)})
    assert plan(state, 8 * 600 - 1).preemptions == ()
    assert len(plan(state, 8 * 600).preemptions) == 1


def test_a_burst_does_not_win():
    queue = [*(waiting(i, 1) for i in range(1, 9)), waiting(20, 2), waiting(21, 2)]
    made = plan(cluster([node(1, 4)], queue), 0)
    assert placed(made) == [1, 20, 2, 21]


def test_a_team_at_its_quota_is_told_so():
    busy = [running(10, 1, [100, 101])]
    made = plan(cluster([node(1)], [waiting(1, 1)], busy, quotas={1: Quota(2, 0)}), 0)
    assert why(made, 1) == ("quota", "Team alpha is at its quota of 2 on pool h100; it cannot borrow.")
    made = plan(cluster([node(1)], [waiting(1, 1, 3)], busy, quotas={1: Quota(1, 2)}), 0)
    assert why(made, 1) == ("quota", "Team alpha uses 2 on pool h100; its quota is 1, and its borrow limit is 2.")
    made = plan(cluster([node(1)], [waiting(1, 1, 4)], busy, quotas={1: Quota(1, 2)}), 0)
    assert why(made, 1)[0] == "quota_never"


def test_borrowed_devices_are_reclaimed_by_their_owner():
    busy = [running(10, 2, [100, 101]), running(11, 2, [102, 103], started_at=-5e4)]
    made = plan(cluster([node(1)], [waiting(1, 1, 2)], busy, quotas={1: Quota(2)}), 0)
    assert [(p.run_id, p.for_run_id, p.code) for p in made.preemptions] == [(11, 1, "reclaim")]
    assert why(made, 1) == ("preempting", "1 run of another team is being preempted for this run.")
    assert made.reservations == (Reservation(1, 1, {1: (102, 103)}, 60.0, cleared=True),)


def test_no_preemption_while_enough_devices_are_being_released():
    busy = [running(10, 2, [100, 101]), running(11, 2, [102, 103], stopping=True)]
    made = plan(cluster([node(1)], [waiting(1, 1, 2)], busy, quotas={1: Quota(2)}), 0)
    assert made.preemptions == ()
    assert why(made, 1) == ("preempting", "Waits for stopping runs to release their devices.")


def test_a_lower_priority_of_the_own_team_makes_room_but_not_of_another():
    own = [running(10, 1, [100], priority=20), running(11, 1, [101], priority=60)]
    made = plan(cluster([node(1, 2)], [waiting(1, 1, priority=50)], own, quotas={1: Quota(2)}), 0)
    assert [p.run_id for p in made.preemptions] == [10]
    other = [running(10, 2, [100], priority=20), running(11, 2, [101], priority=20)]
    made = plan(cluster([node(1, 2)], [waiting(1, 1, priority=50)], other, quotas={2: Quota(2)}), 0)
    assert made.preemptions == ()


def test_fairness_takes_the_lower_priority_of_a_team_first_or_nothing():
    """Otherwise the team exchanges its own: the higher priority comes back for the lower, which holds more devices."""
    high, low = running(10, 2, [100], priority=60), running(11, 2, [101, 102, 103], priority=50)
    made = plan(cluster([node(1)], [waiting(1, 1)], [high, low], usage={2: 1e6}), 0)
    assert [(p.run_id, p.code) for p in made.preemptions] == [(11, "reclaim")]
    young = running(11, 2, [101, 102, 103], priority=50, started_at=-60.0)
    assert plan(cluster([node(1)], [waiting(1, 1)], [high, young], usage={2: 1e6}), 0).preemptions == ()
    owner = plan(cluster([node(1)], [waiting(1, 1)], [high, young], usage={2: 1e6}, quotas={1: Quota(1)}), 0)
    assert [p.run_id for p in owner.preemptions] == [10], "whose quota it is does not wait"


def test_neither_the_young_nor_the_unpreemptible_are_stopped():
    young = running(10, 2, [100], started_at=-60.0)
    fixed = running(11, 2, [101], preemptible=False)
    made = plan(cluster([node(1, 2)], [waiting(1, 1)], [young, fixed], quotas={1: Quota(2)}), 0)
    assert made.preemptions == ()
    assert why(made, 1)[0] == "protected"
    made = plan(
        cluster([node(1, 2)], [waiting(1, 1)], [fixed, running(10, 2, [100], preemptible=False)], quotas={1: Quota(2)}), 0
    )
    assert why(made, 1)[0] == "devices"


def test_only_runs_that_end_in_time_start_in_front_of_the_head():
    busy = [running(10, 2, [103], expected_end=3600.0, preemptible=False)]
    queue = [
        waiting(1, 1, 4),
        waiting(2, 1),
        waiting(3, 1, steps_left=100, steps_per_s=0.02),
        waiting(4, 1, steps_left=100, steps_per_s=0.1),
        waiting(5, 1, max_runtime_s=3000.0, preemptible=False),
    ]
    made = plan(cluster([node(1)], queue, busy), 0)
    assert {p.run_id: p.backfill for p in made.placements} == {4: Backfill(1, 3600.0), 5: Backfill(1, 3600.0)}
    assert (made.reasons[1].code, made.reasons[1].estimated_start) == ("devices", 3600.0)
    assert why(made, 2) == ("reserved", "Waits for 1 device: enough are free, but reserved for run 1 ahead of it.")
    assert made.reasons[2].sooner.startswith("Set a max runtime")
    assert made.reasons[3].sooner.startswith("Set a shorter max runtime")


def test_a_reservation_of_another_team_is_not_named():
    busy = [running(10, 2, [103], preemptible=False)]
    made = plan(cluster([node(1)], [waiting(1, 1, 4), waiting(2, 2)], busy), 0)
    assert why(made, 2) == (
        "reserved",
        "Waits for 1 device: enough are free, but reserved for a run of another team ahead of it.",
    )


def test_backfilled_run_is_preempted_at_the_reservation():
    busy = [running(10, 2, [100, 101], backfill=Backfill(1, 100.0), started_at=-600.0)]
    queue = [waiting(1, 1, 4)]
    assert plan(cluster([node(1)], queue, busy, usage={1: 1e9}), 99).preemptions == ()
    made = plan(cluster([node(1)], queue, busy, usage={1: 1e9}), 100)
    assert [(p.run_id, p.code) for p in made.preemptions] == [(10, "backfill")]


def test_the_words_for_scattered_devices():
    busy = [running(10, 2, [100, 101], preemptible=False), running(11, 2, [200, 201], preemptible=False)]
    nodes = [node(1, model="H100"), node(2, model="H100")]
    made = plan(cluster(nodes, [waiting(1, 1, 4)], busy), 0)
    assert why(made, 1) == ("devices", "Waits for 4 × H100 on one node: 4 are free, spread over 2 nodes.")


def test_reasons_for_what_cannot_start_now():
    needy = waiting(1, needs=frozenset(NEEDS))
    assert why(plan(cluster([], [needy]), 0), 1) == ("no_node", "No worker is connected.")
    assert why(plan(cluster([node(1)], [needy]), 0), 1) == ("missing", "No connected worker has the model m.")
    apart = [node(1, offers=frozenset(NEEDS[:1])), node(2, offers=frozenset(NEEDS[1:]))]
    text = "No single connected worker has all the models and prompts it needs."
    assert why(plan(cluster(apart, [needy]), 0), 1) == ("apart", text)
    large = waiting(1, devices=9, kind="cuda")
    text = "Needs 9 cuda devices on one node; the largest suitable connected node has 8."
    assert why(plan(cluster([node(1, 8)], [large]), 0), 1) == ("too_large", text)
    away = waiting(1, home=(7, "n7"))
    text = "Its checkpoint is on node n7, which is not connected; storage is not shared."
    assert why(plan(cluster([node(1)], [away]), 0), 1) == ("home_away", text)
    text = "All connected nodes are draining."
    assert why(plan(cluster([node(1, draining=True)], [waiting(1)]), 0), 1) == ("draining", text)
    text = "Node n1 is suitable, but low on disk."
    assert why(plan(cluster([node(1, low_disk=True)], [waiting(1)]), 0), 1) == ("disk", text)
    assert why(plan(cluster([node(1, low_disk=True), node(2)], [waiting(1, home=(1, "n1"))]), 0), 1) == ("disk", text)
    text = "the only suitable one is in use. Node n2 accepts no new runs: low on disk."
    code, said = why(plan(cluster([node(1, 1), node(2, 1, low_disk=True)], [waiting(1), waiting(2, submitted_at=1.0)]), 0), 2)
    assert (code, said[-len(text) :]) == ("devices", text)
    text = "Its retry rules exclude all suitable nodes: n1."
    assert why(plan(cluster([node(1)], [waiting(1, excluded_nodes=frozenset([1]))]), 0), 1) == ("excluded", text)
    text = "Needs 4 devices on one node, and too many devices are quarantined."
    assert why(plan(cluster([node(1, states={0: "quarantined"})], [waiting(1, devices=4)]), 0), 1) == ("unhealthy", text)
    text = "No suitable connected node has a cuda device."
    assert why(plan(cluster([node(1, kind="cpu")], [waiting(1, kind="cuda")]), 0), 1) == ("kind", text)


def test_a_pause_after_a_failure():
    made = plan(cluster([node(1)], [waiting(1, not_before=50.0)]), 49)
    assert (made.reasons[1].code, made.reasons[1].estimated_start) == ("backoff", 50.0)
    assert placed(plan(cluster([node(1)], [waiting(1, not_before=50.0)]), 50)) == [1]


def test_infeasible_run_is_known_at_submit():
    away = node(1, connected=False, states={0: "unknown"}, held={1: 9})
    assert feasible_ever(waiting(1, devices=4), cluster([away])) is None
    assert feasible_ever(waiting(1, devices=5), cluster([away])).code == "too_large"
    assert feasible_ever(waiting(1, 1, 3), cluster([away], quotas={1: Quota(1, 1)})).code == "quota_never"
    assert feasible_ever(waiting(1, needs=frozenset(NEEDS)), cluster([away])).text == "No registered worker has the model m."


def test_equal_requests_are_worked_out_once(monkeypatch):
    calls = []
    select = placement.select_devices
    monkeypatch.setattr(placement, "select_devices", lambda *args: calls.append(1) or select(*args))
    counts = []
    for length in (200, 400):
        calls.clear()
        plan(cluster([node(i) for i in range(1, 9)], [waiting(i, i % 3 + 1, 3) for i in range(length)]), 0)
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_run_with_preempted_victims_starts_first():
    held = Reservation(1, 1, {1: (100,)}, 50.0, cleared=True)
    queue = [waiting(1, 1, priority=10), waiting(2, 1, priority=90), waiting(3, 2)]
    made = plan(cluster([node(1, 1)], queue, usage={1: 1e6}, reservations=(held,)), 0)
    assert placed(made) == [1]


def test_a_reason_names_no_run_of_another_team():
    busy = [running(10, 2, [100, 101]), running(11, 1, [102, 103], priority=10)]
    made = plan(cluster([node(1)], [waiting(1, 1, 4)], busy, quotas={1: Quota(4)}), 0)
    assert why(made, 1) == ("preempting", "Run 11 and 1 run of another team are being preempted for this run.")
    owns = [running(11, 1, [102, 103], priority=10), running(12, 1, [100, 101], priority=20)]
    made = plan(cluster([node(1)], [waiting(1, 1, 4)], owns), 0)
    assert why(made, 1) == ("preempting", "Runs 11 and 12 are being preempted for this run.")


def test_remedies_in_reasons():
    busy = [running(10, 2, [100], preemptible=False)]
    made = plan(cluster([node(1, 8)], [waiting(1, 1, 8)], busy), 0)
    assert made.reasons[1].sooner == "Could start now with 7 devices."
    made = plan(cluster([node(1, 8)], [waiting(1, 1, 8), waiting(2, 1, 8)], busy), 0)
    assert made.reasons[1].sooner == "Could start now with 7 devices.", "they are reserved for it"
    assert made.reasons[2].sooner == "Devices free up when running runs end or nodes are added."
    made = plan(cluster([node(1, 8), node(2), node(3)], [waiting(1, 1, 8)], busy), 0)
    assert made.reasons[1].sooner == "Could start now on 2 nodes."
    made = plan(cluster([node(1, 1)], [waiting(1, 1)], busy), 0)
    assert made.reasons[1].sooner == "Devices free up when running runs end or nodes are added."


def test_the_worked_example_of_the_documentation():
    hour = 3600.0
    teams = (
        Team(1, "alpha", 1.0, {1: Quota(8, 4)}, 100 * hour),
        Team(2, "beta", 1.0, {1: Quota(4, 4)}, 50 * hour),
        Team(3, "gamma", 1.0, {}, 12 * hour),
    )
    busy = [
        running(1, 3, range(100, 106), started_at=-2 * hour, expected_end=3 * hour),
        running(2, 2, range(200, 204), started_at=-hour, expected_end=hour, preemptible=False),
    ]
    queue = [waiting(11, 1, 8), waiting(12, 1, 2), waiting(13, 3, 2, max_runtime_s=hour / 2), waiting(14, 2, 2)]
    made = plan(replace(cluster([node(1, 8), node(2, 8)], queue, busy), teams=teams), 0)
    assert placed(made) == [13, 14]
    assert [(p.run_id, p.for_run_id, p.code) for p in made.preemptions] == [(1, 11, "reclaim")]
    assert [(r.run_id, list(r.devices), r.start, r.cleared) for r in made.reservations] == [
        (11, [1], 60.0, True),
        (12, [2], hour / 2, False),
    ]
    assert why(made, 11)[0] == "preempting"
    assert why(made, 12) == ("reserved", "Waits for 2 devices: enough are free, but reserved for run 11 ahead of it.")


def test_every_code_is_documented():
    parts = Path(policy.__file__).parent.glob("*.py")
    codes = {code for part in parts for code in re.findall(r'Reason\(\s*"(\w+)"', part.read_text())}
    page = Path(__file__).parents[2] / "docs" / "scheduling.md"
    documented = set(re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE))
    assert codes | {"backfill", "reclaim", "priority"} == documented

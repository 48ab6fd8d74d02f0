"""A run whose node is silent says since when, while it holds its devices."""

from __future__ import annotations

import pytest
from django.db.models import Subquery

from oppo_platform.runs.models import Attempt
from oppo_platform.runs.selectors import full_summaries, list_runs


def lost_at(world, run):
    [item] = [item for item in list_runs(world.people["ada"])["items"] if item["id"] == run.pk]
    assert world.login("ada").get(f"/api/v1/runs/{run.pk}").json()["lost_contact_at"] == item["lost_contact_at"]
    return item["lost_contact_at"]


def test_contact_is_lost_after_a_while_without_a_heartbeat(world, settings):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    assert lost_at(world, run) is None
    seen = Attempt.objects.get(pk=attempt_id).seen_at
    world.clock.advance(settings.OPPO_NODE_FRESH_S - 1)
    assert lost_at(world, run) is None
    world.clock.advance(2)
    assert lost_at(world, run) == seen.isoformat().replace("+00:00", "Z")


@pytest.mark.parametrize("state", ["ended", "fenced"])
def test_an_attempt_that_is_over_is_not_waited_for(world, settings, state):
    run, attempt_id = world.start(world.worker())
    world.clock.advance(settings.OPPO_NODE_FRESH_S + 1)
    assert lost_at(world, run) is not None
    Attempt.objects.filter(pk=attempt_id).update(state=state)
    assert lost_at(world, run) is None


def test_one_silent_node_of_two_is_enough(pair, settings):
    pair.train()
    assert lost_at(pair.world, pair.run) is None
    silent_since = pair.world.clock.now()
    pair.world.clock.advance(settings.OPPO_NODE_FRESH_S + 1)
    assert pair.beat(pair.head).status_code == 200
    assert lost_at(pair.world, pair.run) == silent_since.isoformat().replace("+00:00", "Z"), "the further node is silent"
    assert pair.beat(pair.other).status_code == 200
    assert lost_at(pair.world, pair.run) is None


def subqueries(expression):
    """The queries in an annotation."""
    if isinstance(expression, Subquery):
        return [expression.query]
    return [query for source in expression.get_source_expressions() if source is not None for query in subqueries(source)]


def test_requests_share_no_subquery_of_the_cached_annotations(world):
    """Compiling a query changes it, and requests are answered in threads."""
    world.submit()
    runs = [full_summaries(), full_summaries()]
    mine, others = ([query for each in r.query.annotations.values() for query in subqueries(each)] for r in runs)
    assert len(mine) >= 8
    assert not {id(query) for query in mine} & {id(query) for query in others}
    assert str(runs[0].query) == str(runs[1].query)
    kept = [dict(query.alias_refcount) for query in others]
    assert [run.pk for run in runs[0]]
    assert kept == [dict(query.alias_refcount) for query in others]

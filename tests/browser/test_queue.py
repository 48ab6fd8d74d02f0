"""The queue: arrows change the priority of one's own runs, by mouse and by keyboard, and a lost platform is told."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.browser


def test_arrows_change_the_priority_and_keep_the_focus(visit, platform):
    from oppo_platform.runs.models import Run

    run_id = platform.submit("letters raised")
    page = visit().page
    page.goto("/queue")
    page.click(f"[data-focus=raise-{run_id}]")
    page.wait_for_selector("#said >> text=letters raised has priority 60 now.")
    page.wait_for_selector(f"[data-focus=raise-{run_id}][data-to='70']")
    page.focus(f"[data-focus=lower-{run_id}]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#said >> text=letters raised has priority 50 now.")
    page.wait_for_function("name => document.activeElement.dataset.focus === name", arg=f"lower-{run_id}")
    assert Run.objects.get(pk=run_id).priority == 50


def test_a_platform_that_is_away_is_told_and_nothing_changes(visit, platform):
    from oppo_platform.runs.models import Run

    run_id = platform.submit("letters kept")
    visitor = visit()
    visitor.expects("net::ERR")  # of the request that is cut off on purpose
    page = visitor.page
    page.goto("/queue")
    page.route("**/priority", lambda route: route.abort())
    page.click(f"[data-focus=raise-{run_id}]")
    page.wait_for_function("() => document.getElementById('said').textContent.trim() !== ''")
    assert Run.objects.get(pk=run_id).priority == 50
    page.unroute("**/priority")
    page.click(f"[data-focus=raise-{run_id}]")  # the arrow can be used again
    page.wait_for_selector("#said >> text=letters kept has priority 60 now.")

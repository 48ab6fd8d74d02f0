"""The Logs tab: search with hits marked, links to a line, and an end that is followed until the reader scrolls up."""

from __future__ import annotations

import pytest

from oppo_contract.events import EVENT

pytestmark = pytest.mark.browser
AT_END = "() => { const l = document.getElementById('log'); return l.scrollHeight - l.scrollTop - l.clientHeight < 24; }"


def shown(page, count):
    page.wait_for_function("n => document.querySelectorAll('#log li').length === n", arg=count)


def test_lines_are_searched_and_linked(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/logs")
    shown(page, 62)
    page.keyboard.press("/")
    page.keyboard.type("STEP 5")
    shown(page, 15)  # 5, 15, 25, 35, 45, 50 to 59
    assert page.locator("#log mark").count() > 15
    assert page.url.endswith("logs?q=STEP+5")
    page.focus("#log")
    page.keyboard.press("p")  # the last line that matches
    page.keyboard.press("p")
    page.keyboard.press("Enter")
    page.wait_for_selector("#log li[aria-current] >> text=step 58 of 60")
    page.go_back()
    shown(page, 15)
    page.locator("#log li", has_text="step 25 of").locator("a").click()
    page.wait_for_selector("#log li[aria-current] >> text=step 25 of 60")
    shown(page, 62)
    link = page.url
    page.go_back()
    shown(page, 15)
    page.goto(link)
    page.wait_for_selector("#log li[aria-current] >> text=step 25 of 60")
    page.select_option("[name=stream]", "supervisor")
    page.wait_for_selector("#log-none >> text=No line matches")
    page.click("#clear")
    shown(page, 62)
    with page.expect_download() as started:
        page.click("text=Whole log")
    assert started.value.path().read_text().count("\n") == 62


def test_the_end_is_followed_until_one_scrolls_up(visit, platform):
    run_id = platform.submit("letters tail", steps=30)
    supervisor, story = platform.start(run_id)

    def write(first, last):
        story.seq += 1
        told = {"kind": "log", "producer": "engine", "seq": story.seq, "time": story.start, "stream": "stdout"}
        supervisor.tell([EVENT.validate_python({**told, "lines": [f"line {i}" for i in range(first, last)]})])

    write(1, 1300)
    page = visit().page
    page.goto(f"/runs/{run_id}/logs")
    shown(page, 1000)
    page.wait_for_function(AT_END)
    write(1300, 1304)
    shown(page, 1004)
    page.wait_for_function(AT_END)
    page.evaluate("document.getElementById('log').scrollTop = 5000")
    page.wait_for_function("() => !document.getElementById('follow-log').checked")
    write(1304, 1306)
    page.wait_for_selector("#news >> text=2 new lines")
    assert page.evaluate("document.getElementById('log').scrollTop") == 5000
    page.click("#news")
    page.wait_for_function(AT_END)
    assert page.locator("#news").is_hidden()
    page.evaluate("document.getElementById('log').scrollTop = 0")
    shown(page, 1307)
    assert page.evaluate("document.getElementById('log').scrollTop") > 1000

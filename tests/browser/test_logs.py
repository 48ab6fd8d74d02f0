"""The Logs tab: search with hits marked, links to a line, and an end that is followed until the reader scrolls up."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from oppo_contract.events import EVENT_ADAPTER

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
    page.wait_for_function("() => document.querySelectorAll('#log mark').length > 15")
    page.wait_for_url("**/logs?q=STEP+5")
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
    page.wait_for_url("**line=*")
    link = page.url
    page.go_back()
    shown(page, 15)
    page.goto(link)
    page.wait_for_selector("#log li[aria-current] >> text=step 25 of 60")
    page.select_option("[name=stream]", "supervisor")
    page.wait_for_selector("#log-none >> text=No line matches")
    page.click("#clear")
    shown(page, 62)
    page.wait_for_function(AT_END)
    with page.expect_download() as started:
        page.click("text=Download log")
    assert started.value.path().read_text().count("\n") == 62


HOSTILE = [
    "\x1b[31mred\x1b[0m and \x1b[1;38;2;10;250;20mbold green\x1b[22;39m plain",
    "\x1b[31m<img src=x onerror=alert(1)>\x1b[0m",
    "\x1b]8;;javascript:alert(1)\x07link\x1b]8;;\x07 \x1b]0;title\x1b\\shown \x1b[2J\x1b[10;10Hmoved\x08\x7f",
    '\x1b[31" onmouseover="alert(1)m \x1b[38;5m \x1b[38;5;999mx\x1b[999;;;mq',
    "\x9b32mC1\x9b0m \x1b[4:3munder\x1b[0m \x1bP+q544e\x1b\\dcs \x1b[" + "1;" * 3000 + "m",
    "\x1b",
]


def test_colour_codes_are_spans_of_our_own_and_all_other_codes_are_dropped(visit, two_runs):
    visitor = visit()
    page = visitor.page
    page.goto(f"/runs/{two_runs[1]}/logs")
    shown(page, 62)
    ansi = 'const { ansi } = await import("/static/js/run/ansi.js");'
    told = page.evaluate(f"async (lines) => {{ {ansi} return lines.map((line) => ansi(line)); }}", HOSTILE)
    assert told[0] == [
        {"text": "red", "classes": ["ansi-1"]}, {"text": " and ", "classes": []},
        {"text": "bold green", "classes": ["ansi-bold", "ansi-2"]}, {"text": " plain", "classes": []},
    ]  # fmt: skip
    texts = ["".join(piece["text"] for piece in line) for line in told]
    assert texts[1] == "<img src=x onerror=alert(1)>"
    assert texts[2] == "link shown moved"
    assert texts[4].startswith("C1 under dcs ")
    assert texts[5] == ""
    control = [character for text in texts for character in text if ord(character) < 32 or 127 <= ord(character) < 160]
    assert control == []
    allowed = {"ansi-" + word for word in (*"01234567", "bold", "dim", "italic", "underline", "inverse", "strike")}
    used = {name for line in told for piece in line for name in piece["classes"]}
    assert used <= allowed | {f"ansi-on-{n}" for n in range(8)}
    drawn = """async (lines) => {
      const { ansi } = await import("/static/js/run/ansi.js");
      const { el } = await import("/static/js/core/dom.js");
      const span = (piece) => el("span", { class: piece.classes.join(" ") }, piece.text);
      const box = el("div", {}, ...lines.flatMap((line) => ansi(line).map(span)));
      const odd = box.querySelectorAll("img, a, [onmouseover], [style]").length;
      return [odd, [...box.children].every((child) => child.attributes.length === 1)];
    }"""
    assert page.evaluate(drawn, HOSTILE) == [0, True]
    # Long nonsense takes time that grows with its length, not with its square: this would not come back.
    repeated = f"async (begin) => {{ {ansi} return ansi(begin.repeat(200000)).length; }}"
    assert page.evaluate(repeated, "\x1b[") == 0
    assert page.evaluate(repeated, "\x1b]") == 0


def write(supervisor, story, first, last):
    """Lines `first` to `last - 1` on the engine's standard output."""
    story.seq += 1
    told = {"kind": "log", "producer": "engine", "seq": story.seq, "time": story.start, "stream": "stdout"}
    supervisor.tell([EVENT_ADAPTER.validate_python({**told, "lines": [f"line {i}" for i in range(first, last)]})])


def test_the_end_is_followed_until_one_scrolls_up(visit, platform):
    run_id = platform.submit("letters tail", steps=30)
    supervisor, story = platform.start(run_id)
    write(supervisor, story, 1, 1300)
    page = visit().page
    page.goto(f"/runs/{run_id}/logs")
    shown(page, 1000)
    page.wait_for_function(AT_END)
    write(supervisor, story, 1300, 1304)
    shown(page, 1004)
    page.wait_for_function(AT_END)
    page.evaluate("document.getElementById('log').scrollTop = 5000")
    page.wait_for_function("() => !document.getElementById('follow-log').checked")
    write(supervisor, story, 1304, 1306)
    page.wait_for_selector("#news >> text=2 new lines")
    assert page.evaluate("document.getElementById('log').scrollTop") == 5000
    page.click("#news")
    page.wait_for_function(AT_END)
    expect(page.locator("#news")).to_be_hidden()
    page.evaluate("document.getElementById('log').scrollTop = 0")
    shown(page, 1307)
    page.wait_for_function("() => document.getElementById('log').scrollTop > 1000")


@pytest.mark.full
def test_a_page_holds_a_bounded_part_of_a_long_log_wherever_one_reads(visit, platform):
    run_id = platform.submit("letters endless", steps=30)
    supervisor, story = platform.start(run_id)
    for first in range(1, 6401, 800):
        write(supervisor, story, first, first + 800)
    page = visit().page
    page.goto(f"/runs/{run_id}/logs")
    for count in (1000, 2000, 3000, 4000, 5000):
        shown(page, count)
        before = page.text_content("#log li:first-child .msg")
        page.evaluate("document.getElementById('log').scrollTop = 0")
    page.wait_for_function("before => document.querySelector('#log li .msg').textContent !== before", arg=before)
    shown(page, 5000)
    expect(page.locator("#news")).to_have_text("Latest ↓")
    last = page.text_content("#log li:last-child .msg")
    page.evaluate("() => { const l = document.getElementById('log'); l.scrollTop = l.scrollHeight; }")
    page.wait_for_function("last => document.querySelector('#log li:last-child .msg').textContent !== last", arg=last)
    shown(page, 5000)
    write(supervisor, story, 6401, 6403)
    page.click("#news")
    page.wait_for_selector("#log li:last-child >> text=line 6402")
    page.wait_for_function(AT_END)

"""The Samples tab: search, sorting and opening by mouse and keyboard, what changed over the steps, and a link to all of it."""

from __future__ import annotations

import itertools
import re

import pytest
from playwright.sync_api import expect

from oppo_contract.events import ChatTurn
from tests.browser.story import SCRIPT

pytestmark = pytest.mark.browser


def steps_shown(page, *steps):
    """Wait until the rows are of these steps, in this order."""
    page.wait_for_function(
        "steps => [...document.querySelectorAll('#rows tr[data-id] [data-name=step]')].map(c => +c.textContent).join() === steps",
        arg=",".join(map(str, steps)),
    )


def test_answers_are_found_sorted_and_opened(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/samples")
    steps_shown(page, *range(60, 10, -1))
    page.click("#more")
    steps_shown(page, *range(60, 0, -1))
    page.keyboard.press("/")
    page.keyboard.type('"DAY 5" harbour')
    steps_shown(page, 58, 56, 54, 52, 50)
    expect(page.locator("#rows mark").first).to_have_text(re.compile("^(harbour|day 5)$", re.IGNORECASE))
    page.click("[data-sort=step]")
    steps_shown(page, 50, 52, 54, 56, 58)
    page.wait_for_url("**/samples?q=%22DAY+5%22+harbour&sort=step")
    page.go_back()
    steps_shown(page, 58, 56, 54, 52, 50)
    page.focus("#rows .opener")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".detail .same-prompt >> text=30 responses to this prompt")
    page.keyboard.press("Escape")
    expect(page.locator(".detail")).to_have_count(0)
    page.click("#clear")
    steps_shown(page, *range(60, 10, -1))
    page.fill("[name=to_step]", "2")
    steps_shown(page, 2, 1)
    page.select_option("[name=held_out]", "true")
    page.wait_for_selector("#nothing >> text=No response matches")


def test_a_prompt_is_compared_over_the_steps_and_the_link_keeps_it(visit, two_runs):
    visitor = visit()
    page = visitor.page
    page.goto(f"/runs/{two_runs[1]}/samples?from_step=59&to_step=59")
    page.click("#rows .opener")
    page.click("text=Compare over steps")
    page.wait_for_selector(".diff-text ins")
    expect(page.locator(".diff-text .text del")).to_have_text("1")
    expect(page.locator(".diff-text .text ins").last).to_have_text("59")
    page.wait_for_url("**diff=*")
    before = page.url
    page.select_option("[aria-label=older]", index=1)
    page.wait_for_selector(".diff-text del >> text=only in step 3")
    page.wait_for_url(lambda url: "open=" in url and "diff=" in url and url != before)
    link = page.url
    page.goto(link.replace("from_step=59&to_step=59", "from_step=7&to_step=7"))
    page.wait_for_selector("#linked .diff-text del >> text=only in step 3")
    page.click("text=Show all")
    steps_shown(page, *range(1, 61, 2))
    # What the model and the user wrote has stayed text through all of it.
    assert page.evaluate("window.pwned") is None
    assert page.locator("#main img, #rows script").count() == 0


def test_word_diffs_are_both_texts_and_no_crumbs(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/samples")
    texts = [
        "",
        "the grey sea",
        "the blue sea today",
        "海は今日も灰色です",
        "海は明日も青いです",
        "a  b\n\nc",
        "c b a",
        "x " * 300,
        "y " * 299 + "x",
    ]
    diff = 'const { wordDiff } = await import("/static/js/run/word-diff.js");'
    pairs = "texts.flatMap((a) => texts.map((b) => [a, b, wordDiff(a, b)]))"
    diffs = page.evaluate(f"async (texts) => {{ {diff} return {pairs}; }}", texts)
    for before, after, parts in diffs:
        assert "".join(text for kind, text in parts if kind != "new") == before
        assert "".join(text for kind, text in parts if kind != "gone") == after
        assert all(kind != other for (kind, _), (other, _) in itertools.pairwise(parts))
        assert (before == after) == all(kind == "same" for kind, _ in parts)
    grey = page.evaluate(f"async () => {{ {diff} return wordDiff('the grey old sea', 'the blue cold sea'); }}")
    assert grey == [["same", "the "], ["gone", "grey old"], ["new", "blue cold"], ["same", " sea"]]


def test_without_answers_the_page_says_why(visit, platform):
    run_id = platform.submit("letters silent", steps=5)
    page = visit().page
    page.goto(f"/runs/{run_id}/samples")
    page.wait_for_selector("#nothing >> text=No samples yet")
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(1)))
    steps_shown(page, 1)
    supervisor.tell(list(story.tell(2)))
    page.click("#fresh")
    steps_shown(page, 3, 2, 1)


def test_chat_turns_are_shown_apart_and_as_text(visit, platform):
    run_id = platform.submit("letters chat", steps=5)
    supervisor, story = platform.start(run_id)
    told = list(story.tell(1))
    turns = [{"role": "system", "content": f"Be brief. {SCRIPT}"}, {"role": "user", "content": "What is grey?"}]
    turns += [{"role": "assistant", "content": "The harbour."}, {"role": "user", "content": f"And the sea? {SCRIPT}"}]
    for event in (event for event in told if event.kind == "samples"):
        sample = event.samples[0].model_copy(
            update={"prompt": turns[-1]["content"], "messages": [ChatTurn(**turn) for turn in turns]}
        )
        told[told.index(event)] = event.model_copy(update={"samples": [sample]})
    supervisor.tell(told)
    visitor = visit()
    page = visitor.page
    page.goto(f"/runs/{run_id}/samples")
    expect(page.locator("#rows .line").first).to_have_text(turns[-1]["content"])
    page.focus("#rows .opener")
    page.keyboard.press("Enter")
    expect(page.locator(".detail dt")).to_have_text(["system", "user", "assistant", "user", "response"])
    expect(page.locator(".detail dd .text").first).to_have_text(turns[0]["content"])
    assert page.evaluate("window.pwned") is None
    for width in (1440, 1024, 390):
        page.set_viewport_size({"width": width, "height": 900})
        visitor.fits()

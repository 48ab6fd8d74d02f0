"""Samples side by side, of one run over its steps and of several runs: order, filter, steps, marks, links, and what is empty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser import screenshots
from tests.browser.conftest import spec_data
from tests.browser.story import SCRIPT
from tests.browser.test_pages import faults

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
EVALUATED_AT = (0, 2, 4, 6)
PROMPTS = ("the sea", "the harbour", "the storm")


def held_out(run_name, step, rewards):
    """An evaluation's samples: one prompt's reward rises, one's falls, one's stays."""
    return [
        {
            "sequence_id": n,
            "prompt": f"write a letter about {PROMPTS[n]} {SCRIPT}",
            "response": f"Dear friend, {PROMPTS[n]} is grey on day {step if n < 2 else 0}, writes {run_name}. {SCRIPT}",
            "stale_response": "",
            "score": reward,
            "kl": 0.0,
            "length": 20 + 10 * n + step,
            "age": 0,
            "versions": (step, step),
            "held_out": True,
            "ending": "length" if n == 1 else "eos",
        }
        for n, reward in enumerate(rewards)
    ]


def evaluated(platform, name, rise, respond=None):
    """A run of six steps with four evaluations; `respond(step, prompt)`: its responses."""
    from oppo_contract.spec import load_spec
    from oppo_platform.runs.services import submit_run

    platform.fleet.beat()
    evaluation = {"prompts": "letters/prompts.jsonl", "every_steps": 2}
    spec = load_spec({**spec_data(name, overlap=True, steps=6), "evaluation": evaluation})
    run_id = int(submit_run(platform.user, platform.project, spec).pk)
    supervisor, story = platform.start(run_id)
    for step in EVALUATED_AT:
        supervisor.tell(list(story.tell(2)) if step else [])
        samples = held_out(name, step, (0.1 + rise * step, 1.0 - 0.05 * step, 0.5))
        for sample in samples if respond else ():
            sample["response"] = respond(step, sample["sequence_id"])
        supervisor.tell([story._event("samples", step=step, samples=samples)])
    supervisor.tell(story.end())
    supervisor.end("succeeded", "All steps are done.")
    return run_id


@pytest.fixture(scope="module")
def evaluated_runs(platform):
    return evaluated(platform, "letters slow", 0.05), evaluated(platform, "letters fast", 0.2)


def prompts_shown(page, *names):
    """Wait until the cards are those of these prompts, in this order."""
    page.wait_for_function(
        "names => [...document.querySelectorAll('#prompts h2')].map(h => h.textContent).join() === names",
        arg=",".join(f"Eval prompt #{PROMPTS.index(name)}" for name in names),
    )


def headings(page):
    return page.locator("#prompts article").first.locator("h3").all_text_contents()


def test_one_run_over_its_steps(visit, evaluated_runs):
    visitor = visit()
    page = visitor.page
    page.goto(f"/runs/{evaluated_runs[1]}/samples")
    page.click("nav[aria-label='View of the samples'] >> text=Side by side")
    prompts_shown(page, "the sea", "the harbour", "the storm")
    assert headings(page) == ["Step 0", "Step 2", "Step 4", "Step 6"]
    card = page.locator("#prompts article").first
    expect(card.locator(".reading")).to_have_text("reward +1.20")
    expect(card.locator(".response").nth(3).locator("ins")).to_have_text("6")
    expect(card.locator("del")).to_have_count(0)
    expect(page.locator("#prompts article").nth(2).locator("text=Same as on the left.")).to_have_count(3)

    page.select_option("[name=marks]", "removed")
    expect(card.locator(".response").nth(3).locator("del")).to_have_text("4")
    page.select_option("[name=sort]", "worst")
    prompts_shown(page, "the sea", "the storm", "the harbour")
    page.click("[aria-label='Remove step 2']")
    page.wait_for_url("**/side-by-side?**steps=0,4,6**")
    expect(card.locator("h3")).to_have_text(["Step 0", "Step 4", "Step 6"])
    page.go_back()
    expect(card.locator("h3")).to_have_text(["Step 0", "Step 2", "Step 4", "Step 6"])
    page.click("[aria-label='Remove step 0']")
    page.select_option("#add-step", "latest")
    expect(page.locator("#steps .token")).to_have_text(["step 2×", "step 4×", "step 6×", "latest step×"])


def test_filter_download_and_links(visit, evaluated_runs):
    page = visit().page
    page.goto(f"/runs/{evaluated_runs[1]}/samples/side-by-side?sort=worst&steps=2,4,6")
    prompts_shown(page, "the sea", "the storm", "the harbour")
    card = page.locator("#prompts article").first
    page.keyboard.press("/")
    page.keyboard.type("HARBOUR")
    prompts_shown(page, "the harbour")
    expect(card.locator("mark").first).to_have_text("harbour")
    page.wait_for_url("**q=HARBOUR**")
    with page.expect_download() as download:
        page.click("#download")
    lines = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    assert [(line["step"], line["sequence_id"]) for line in lines] == [(2, 1), (4, 1), (6, 1)]

    page.fill("[name=min_score]", "7")
    page.wait_for_selector("#nothing >> text=No prompt matches")
    page.click("#clear-too")
    prompts_shown(page, "the sea", "the storm", "the harbour")
    card.locator("h3 a").last.click()
    page.wait_for_selector(".sample-detail >> text=Side by side")
    page.click(".sample-detail >> text=Side by side")
    prompts_shown(page, "the sea")
    page.click("[aria-label='Show all prompts']")
    prompts_shown(page, "the sea", "the harbour", "the storm")
    # What the model and the user wrote has stayed text through all of it.
    assert page.evaluate("window.pwned") is None
    assert page.locator("#prompts img, #prompts script").count() == 0


def test_excerpts_are_compared_only_where_they_start_at_the_same_place(visit, platform):
    def respond(step, prompt):
        if prompt == 2:
            return "🌊" * 2500 + " zanzibar"  # 5,009 UTF-16 units, but not 4,000 characters
        same_start = "a " * (2500 if step < 4 else 2400) + "zanzibar " + "b " * 250
        return same_start if prompt else f"Day {step}. {same_start}"

    run_id = evaluated(platform, "letters long", 0.1, respond)
    page = visit().page
    page.goto(f"/runs/{run_id}/samples/side-by-side?steps=0,2,4&sort=prompt&q=zanzibar")
    prompts_shown(page, "the sea", "the harbour", "the storm")
    sea, harbour, storm = (page.locator("#prompts article").nth(n).locator(".response") for n in range(3))
    for cells in (sea, harbour):
        expect(cells.locator("text=Whole response")).to_have_count(3)
        expect(cells.locator("text=Same as on the left.")).to_have_count(0)
        expect(cells.locator("ins")).to_have_count(0)
        expect(cells.locator("text=differences are not marked")).to_have_count(1)
        expect(cells.nth(2).locator("text=differences are not marked")).to_have_count(1)
    expect(storm.locator("text=Whole response")).to_have_count(0)
    expect(storm.locator("text=Same as on the left.")).to_have_count(2)


def test_several_runs_at_a_step(visit, evaluated_runs):
    slow, fast = evaluated_runs
    page = visit().page
    page.goto(f"/compare?runs={slow},{fast}")
    page.wait_for_selector("#plot-reward .main-svg")
    page.click("nav[aria-label=Compare] >> text=Samples")
    page.wait_for_url(f"**/compare/samples?runs={slow},{fast}")
    prompts_shown(page, "the sea", "the harbour", "the storm")
    assert headings(page) == [f"letters slow #{slow} · step 6", f"letters fast #{fast} · step 6"]
    expect(page.locator("#prompts .reading").first).to_have_text("rewards differ by 0.90")
    expect(page.locator("#steps .token")).to_have_text(["latest common step (6)×"])
    page.select_option("#add-step", "2")
    expect(page.locator("#prompts article").first.locator("h3")).to_have_count(4)
    page.click("[aria-label='Remove latest common step']")
    expect(page.locator("#prompts article").first.locator("h3")).to_have_text(
        [f"letters slow #{slow} · step 2", f"letters fast #{fast} · step 2"]
    )
    link = page.url
    assert f"runs={slow},{fast}&steps=2" in link
    page.click(f"[aria-label='Remove letters slow #{slow}']")
    page.wait_for_url(f"**/compare/samples?runs={fast}&steps=2")
    expect(page.locator("#prompts article").first.locator("h3")).to_have_text(["Step 2"])
    page.go_back()
    expect(page.locator("#prompts article").first.locator("h3")).to_have_count(2)
    page.click("nav[aria-label=Compare] >> text=Curves")
    page.wait_for_url(f"**/compare?runs={slow},{fast}**")


def test_without_samples_the_page_names_the_missing_setting(visit, two_runs):
    visitor = visit()
    page = visitor.page
    page.goto(f"/runs/{two_runs[1]}/samples/side-by-side")
    page.wait_for_selector("#nothing >> text=Set evaluation.prompts")
    expect(page.locator("#fork")).to_be_visible()
    page.click("#show-training")
    page.wait_for_url("**held_out=false")
    expect(page.locator("#prompts article")).to_have_count(2)
    assert headings(page)[0] == "Step 1"
    page.goto("/compare/samples")
    page.wait_for_selector("#choose-runs >> text=Select two or more runs")
    visitor.expects("404")  # a browser logs the status of a request itself
    page.goto("/compare/samples?runs=99999999")
    page.wait_for_selector("#refused >> text=does not exist or belongs to a team")


def test_newer_samples_are_loaded_on_request(visit, platform):
    run_id = platform.submit("letters growing", steps=12)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(2)))
    page = visit().page
    page.goto(f"/runs/{run_id}/samples/side-by-side?held_out=false")
    page.wait_for_selector("#nothing >> text=No training prompt occurs twice")
    supervisor.tell(list(story.tell(2)))
    expect(page.locator("#prompts article")).to_have_count(2)  # nothing was shown that could move
    expect(page.locator("#fresh")).to_be_hidden()
    supervisor.tell(list(story.tell(4)))
    page.click("#fresh >> text=Newer samples: reload")
    expect(page.locator("#steps .token").last).to_have_text("step 8×")
    expect(page.locator("#fresh")).to_be_hidden()


@pytest.mark.full
def test_pictures_are_taken_of_every_page(chromium, platform, two_runs, evaluated_runs, tmp_path, monkeypatch):
    from oppo_contract.spec import load_spec
    from oppo_platform.runs.models import Run
    from oppo_platform.usecases.check_spec import ClusterView
    from oppo_platform.usecases.run_plan import plan_run

    run = Run.objects.get(pk=two_runs[0])
    run.plan = plan_run(load_spec(run.spec), {}, ClusterView(), platform.project.team_id)
    run.save(update_fields=["plan"])
    monkeypatch.setattr(screenshots, "SHAPES", {"-dark": screenshots.SHAPES["-dark"]})
    platform.fleet.beat()
    screenshots.shoot(chromium, platform.web.url, platform.login_path(), tmp_path)
    names = {path.name.removesuffix("-dark.png") for path in tmp_path.iterdir()}
    in_docs = {path.name.removesuffix("-dark.png") for path in (ROOT / "docs" / "img").glob("*-dark.png")}
    assert in_docs == names - {"logs"} | {"first-run"}  # a log names folders of the machine that took the picture
    assert set(screenshots.addresses([])) == {"first-run", "alerts", "queue"}


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
def test_side_by_side_fits_every_width_and_is_accessible(visit, evaluated_runs, scheme):
    slow, fast = evaluated_runs
    visitor = visit(color_scheme=scheme, reduced_motion="reduce")
    page = visitor.page
    for path in (f"/runs/{fast}/samples/side-by-side?marks=removed", f"/compare/samples?runs={slow},{fast}&steps=0,4,latest"):
        page.goto(path)
        page.wait_for_selector("#prompts article >> nth=2")
        for width in (1440, 1024, 390):
            page.set_viewport_size({"width": width, "height": 900})
            visitor.fits()
        assert faults(page) == [], path
        page.set_viewport_size({"width": 1440, "height": 900})
        assert faults(page) == [], path

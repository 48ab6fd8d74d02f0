"""From the form to the queue: presets, live validation, two views of one spec, forks."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from oppo_contract import wire
from oppo_platform.runs.models import Run
from tests.browser import fleet

pytestmark = pytest.mark.browser

READY = "#send[aria-disabled=false]"
CRITIC_AND_GROUP = ("models.critic", "ppo.critic_learning_rate", "ppo.group_size")


def open_form(visit, path="/runs/new"):
    page = visit().page
    page.goto(path)
    page.wait_for_selector(READY)
    return page


def test_a_run_goes_from_the_form_into_the_queue(visit, platform, two_runs):
    from oppo_platform.scheduling.cycle import run_cycle

    holder = platform.submit("letters holder", steps=10)
    platform.start(holder)
    page = open_form(visit)
    page.check("input[name=preset][value=sequential]")
    page.fill("[data-path=name]", "from the form")
    page.fill("[data-path=steps]", "25")
    page.fill("[data-path='ppo.learning_rate']", "2e-5")
    page.fill("[data-path='budget.target_reward']", "1.2")
    page.select_option("[data-path='models.actor']", "letters/actor")
    page.wait_for_selector(READY)
    page.click("#send")
    page.wait_for_url(re.compile(r"/runs/\d+$"))
    page.wait_for_selector(".pill[data-state=queued]")
    run = Run.objects.order_by("-id").first()
    assert (run.name, run.preset, run.total_steps, run.target_reward) == ("from the form", "sequential", 25, 1.2)
    assert run.spec["ppo"]["learning_rate"] == 2e-5
    run_cycle()
    page.goto("/queue")
    row = page.locator(".queue tr", has_text="from the form")
    expect(row).to_contain_text("in use")
    expect(page.locator("#pool-1")).to_contain_text("letters holder")


def test_the_preset_grpo_replaces_the_critic_by_groups_and_can_be_left_again(visit, platform):
    page = open_form(visit)
    critic, rate, group = (page.locator(f"[data-path='{path}']") for path in CRITIC_AND_GROUP)
    expect(group).to_be_disabled()
    page.fill("[data-path='ppo.critic_learning_rate']", "2e-5")
    page.fill("[data-path=steps]", "10")
    page.check("input[name=preset][value=grpo]")
    page.wait_for_selector(READY)
    expect(group).to_have_value("8")
    expect(critic).to_be_disabled()
    expect(rate).to_be_disabled()
    expect(page.locator("#plan-answers")).to_have_text("1,280")  # 10 steps of 16 prompts
    expect(page.locator("input[value=grpo]")).to_be_checked()
    page.fill("[data-path='ppo.group_size']", "4")
    page.wait_for_selector(READY)
    expect(page.locator("#plan-answers")).to_have_text("640")
    expect(page.locator("input[value=grpo]")).to_be_checked()  # a size of one's own is still GRPO
    page.check("input[name=preset][value=sequential]")
    page.wait_for_selector(READY)
    expect(rate).to_have_value("2e-5")
    expect(critic).to_have_value("reward")
    expect(group).to_be_disabled()
    expect(page.locator("#plan-answers")).to_have_text("160")
    page.check("input[name=preset][value=grpo]")
    page.wait_for_selector(READY)
    page.click("#send")
    page.wait_for_url(re.compile(r"/runs/\d+$"))
    spec = Run.objects.order_by("-id").first().spec
    assert (spec["ppo"]["algorithm"], spec["ppo"]["group_size"], spec["models"]["critic"]) == ("grpo", 8, "actor")


def test_an_algorithm_from_the_list_takes_along_what_belongs_to_it(visit, platform):
    page = open_form(visit)
    critic, rate, group = (page.locator(f"[data-path='{path}']") for path in CRITIC_AND_GROUP)
    page.fill("[data-path='ppo.critic_learning_rate']", "2e-5")
    expect(critic).to_have_value("reward")
    page.select_option("[data-path='ppo.algorithm']", "grpo")
    page.wait_for_selector(READY)
    expect(group).to_have_value("8")
    expect(critic).to_be_disabled()
    page.fill("[data-path='ppo.group_size']", "4")
    page.select_option("[data-path='ppo.algorithm']", "rloo")
    page.wait_for_selector(READY)
    expect(group).to_have_value("4")
    page.select_option("[data-path='ppo.algorithm']", "ppo")
    page.wait_for_selector(READY)
    expect(rate).to_have_value("2e-5")
    expect(critic).to_have_value("reward")
    expect(group).to_be_disabled()


def test_a_wrong_value_is_told_at_its_field_while_one_types(visit, platform):
    page = open_form(visit)
    page.fill("[data-path='overlap.overcommit.max']", "999")
    error = page.locator("[data-field='overlap.overcommit.max'] .error")
    error.wait_for(state="visible")
    expect(error).to_contain_text("16")
    expect(page.locator("[data-path='overlap.overcommit.max']")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#send")).to_have_attribute("aria-disabled", "true")
    expect(page.locator("#why-not")).to_contain_text("Fix 1 problem")
    page.fill("[data-path='overlap.overcommit.max']", "16")
    page.wait_for_selector(READY)
    expect(error).to_be_hidden()
    page.fill("[data-path=steps]", "many")
    page.locator("[data-field=steps] .error").wait_for(state="visible")


def test_an_actor_with_another_tokenizer_is_refused_before_anything_is_queued(visit, platform):
    page = open_form(visit)
    page.select_option("[data-path='models.actor']", "letters/other-actor")
    page.wait_for_selector("#problems >> text=tokenizer")
    expect(page.locator("#why-not")).to_contain_text("to submit")
    expect(page.locator("#send")).to_have_attribute("aria-disabled", "true")


def test_yaml_and_form_are_two_views_of_one_spec(visit, platform):
    page = open_form(visit)
    page.fill("[data-path=steps]", "77")
    page.wait_for_selector(READY)
    page.click("[data-view=yaml]")
    expect(page.locator("#yaml")).to_have_value(re.compile(r"^steps: 77$", re.MULTILINE))
    text = page.input_value("#yaml")
    page.fill("#yaml", text.replace("steps: 77", "steps: 78").replace("inter_step: defer", "inter_step: off"))
    page.wait_for_function("() => document.querySelector('#plan-answers').textContent === '1,248'")
    page.click("[data-view=form]")
    expect(page.locator("[data-path=steps]")).to_have_value("78")
    expect(page.locator("[data-path='overlap.max_age']")).to_be_disabled()
    expect(page.locator("#custom")).to_be_visible()


def test_a_reward_in_parts_goes_through_the_form_unchanged(visit, platform):
    page = open_form(visit)
    page.click("[data-view=yaml]")
    parts = "  reward:\n    parts:\n      - rule: letters:score\n      - model: {path: letters/reward}\n"
    text = re.sub(r"  reward:\n(?:    .*\n)+", parts, page.input_value("#yaml"))
    page.fill("#yaml", text.replace("critic: reward", "critic: actor").replace("\nsteps: ", "\nsteps: 7"))
    page.wait_for_function("() => document.querySelector('#plan-answers').textContent === '115,200'")
    page.wait_for_selector(READY)
    page.click("[data-view=form]")
    expect(page.locator("[data-path='models.reward'] option:checked")).to_contain_text("several sources")
    page.fill("[data-path=steps]", "79")
    page.wait_for_selector(READY)
    page.click("[data-view=yaml]")
    expect(page.locator("#yaml")).to_have_value(re.compile(r"^steps: 79$", re.MULTILINE))
    assert "rule: letters:score" in page.input_value("#yaml")


def test_broken_yaml_is_told_live_with_place_and_remedy(visit, platform):
    page = open_form(visit)
    page.click("[data-view=yaml]")
    good = page.input_value("#yaml")
    page.fill("#yaml", "name: [1\n")
    page.wait_for_selector("#problems >> text=not valid YAML at line")
    page.fill("#yaml", good.replace("batch_size:", "batchsize:"))
    page.wait_for_selector("#problems >> text=Did you mean batch_size?")
    page.click("text=Go to the line")
    chosen = "() => yaml.value.slice(yaml.selectionStart, yaml.selectionEnd).trim()"
    page.wait_for_function(f"() => ({chosen})().startsWith('batchsize:')")
    expect(page.locator("#send")).to_have_attribute("aria-disabled", "true")


def test_a_fork_starts_from_the_other_runs_spec(visit, two_runs):
    page = open_form(visit, f"/runs/new?from={two_runs[0]}")
    expect(page.locator("[data-path=name]")).to_have_value("letters sequential fork")
    expect(page.locator("input[value=sequential]")).to_be_checked()
    expect(page.locator("[data-path='budget.target_reward']")).to_have_value("1")
    page.fill("[data-path=seed]", "5")
    page.wait_for_selector("#changes >> text=1 change")


def test_a_submission_whose_answer_is_lost_may_be_tried_again_and_is_one_run(visit, platform):
    visitor = visit()
    visitor.expects("Failed to load resource")
    page = visitor.page
    page.goto("/runs/new")
    page.fill("[data-path=name]", "answered twice")
    page.wait_for_selector(READY)

    def lose(route):
        route.fetch()  # the server has done it
        route.abort()

    page.route("**/api/v1/runs", lose, times=1)
    page.click("#send")
    expect(page.locator("#lost")).to_contain_text("the run may exist")
    no_room = {"status": 507, "json": {"detail": "The database has no room."}}
    page.route("**/api/v1/runs", lambda route: route.fulfill(**no_room), times=1)
    page.click(READY)
    expect(page.locator("#why-not")).to_have_text("The database has no room.")
    page.click(READY)
    page.wait_for_url(re.compile(r"/runs/\d+$"))
    (run,) = Run.objects.filter(name="answered twice")
    assert page.url.endswith(f"/runs/{run.pk}")


@pytest.mark.full
def test_a_check_that_the_server_could_not_make_is_made_again(visit, platform):
    visitor = visit()
    visitor.expects("Failed to load resource")
    page = visitor.page
    page.clock.install()
    page.goto("/runs/new")
    page.wait_for_selector(READY)
    page.route("**/validate", lambda route: route.fulfill(status=503, json={"detail": "In a moment."}), times=1)
    page.fill("[data-path=steps]", "9")
    page.clock.run_for(300)
    expect(page.locator("#why-not")).to_have_text("In a moment.")
    page.clock.run_for(3000)
    page.wait_for_selector(READY)


@pytest.mark.full
def test_form_keeps_its_input_when_the_session_ends(visit, platform):
    visitor = visit()
    visitor.expects("401 (Unauthorized)")
    page = visitor.page
    page.clock.install()
    page.goto("/runs/new")
    page.fill("[data-path=name]", "typed before")
    page.clock.run_for(300)
    page.wait_for_selector(READY)
    visitor.context.clear_cookies()
    page.evaluate("async () => { const { askUnread } = await import('/static/js/core/bell.js'); return askUnread(); }")
    expect(page.locator("#signed-out a")).to_be_visible()
    other = visitor.context.new_page()
    other.goto(platform.login_path())
    page.clock.run_for(3000)
    expect(page.locator("#signed-out")).to_be_hidden()
    page.click(READY)
    page.wait_for_url(re.compile(r"/runs/\d+$"))
    assert Run.objects.filter(name="typed before").count() == 1


def test_an_empty_setting_shows_the_value_that_the_run_will_use(visit, platform):
    page = open_form(visit)
    box = page.locator("[data-path='overlap.chunk.size']")
    expect(box).to_have_value("")
    expect(box).to_have_attribute("placeholder", "32")
    page.fill("[data-path='rollout.max_new_tokens']", "40")
    expect(box).to_have_attribute("placeholder", "8")
    note = page.locator("#f-overlap-chunk-size-h .chosen")
    expect(note).to_contain_text("This run: 8, because a quarter of max_new_tokens, 40")
    expect(note).to_have_css("display", "block")
    expect(note).to_have_css("border-top-width", "0px")  # plain text: a box would look like another input
    expect(page.locator("[data-path='ppo.learning_rate']")).to_have_attribute("placeholder", "3e-4")


def test_a_model_that_no_run_can_use_is_listed_with_the_reason_and_cannot_be_chosen(visit, platform):
    page = open_form(visit)
    option = page.locator("[data-path='models.actor'] option", has_text="letters/linked")
    expect(option).to_have_text("letters/linked (unusable)")
    expect(option).to_have_attribute("title", "it is a link to /data/linked, outside the models root /models")
    expect(option).to_be_disabled()
    expect(page.locator("[data-path='models.actor'] option").last).to_have_text(re.compile("linked"))


SMOLLM2 = [
    wire.CatalogueEntry(id="smollm2/model", kind="model", bytes=9, task="causal_lm", tokenizer_digest="s", context=8192),
    wire.CatalogueEntry(id="smollm2/sentiment.jsonl", kind="prompts", bytes=9, rows=640),
    wire.CatalogueEntry(id="smollm2/sentiment-heldout.jsonl", kind="prompts", bytes=9, rows=64),
]


def test_an_example_tells_its_command_and_can_be_submitted_once_a_worker_has_its_models(visit, platform, monkeypatch):
    page = open_form(visit)
    expect(page.locator(".needs")).to_be_hidden()
    page.check("input[name=preset][value=sentiment]")
    expect(page.locator(".needs .command")).to_have_text("oppo example smollm2")
    expect(page.locator("[data-path=name]")).to_have_value("smollm2 sentiment")
    expect(page.locator("#problems")).to_contain_text("run `oppo example smollm2` on a worker")
    page.fill("[data-path=steps]", "7")
    page.focus(".needs button")
    monkeypatch.setattr(fleet, "CATALOGUE", [*fleet.CATALOGUE, *SMOLLM2])
    platform.fleet.beat()
    expect(page.locator(".needs .visually-hidden", has_text="Done")).to_be_attached()
    expect(page.locator(".needs button")).to_be_focused()
    page.wait_for_selector(READY)
    expect(page.locator("[data-path='models.actor'] option:checked")).to_have_text("smollm2/model")
    expect(page.locator("[data-path=steps]")).to_have_value("7")
    page.keyboard.press("Enter")
    expect(page.locator(".toast")).to_have_text(re.compile("Copied|Selected"))
    page.check("input[name=preset][value=sequential]")
    expect(page.locator(".needs")).to_be_hidden()
    expect(page.locator("[data-path='models.actor']")).to_have_value("smollm2/model")
    monkeypatch.undo()
    platform.fleet.beat()


def test_prompts_from_several_files_go_through_the_form_unchanged(visit, platform):
    page = open_form(visit)
    prompts = page.locator("[data-path='data.prompts']")
    assert "several files (see YAML)" not in prompts.inner_text()
    page.click("[data-view=yaml]")
    files = "prompts:\n    - letters/prompts.jsonl\n    - letters/prompts.jsonl\n"
    page.fill("#yaml", page.input_value("#yaml").replace("prompts: letters/prompts.jsonl\n", files))
    page.wait_for_selector(READY)
    page.click("[data-view=form]")
    expect(prompts.locator("option:checked")).to_have_text("several files (see YAML)")
    page.fill("[data-path=steps]", "81")
    page.wait_for_selector(READY)
    page.click("[data-view=yaml]")
    expect(page.locator("#yaml")).to_have_value(re.compile(r"^steps: 81$", re.MULTILINE))
    assert page.input_value("#yaml").count("- letters/prompts.jsonl\n") == 2
    page.click("[data-view=form]")
    prompts.select_option("letters/prompts.jsonl")
    page.wait_for_selector(READY)
    page.click("[data-view=yaml]")
    expect(page.locator("#yaml")).to_have_value(re.compile(r"prompts: letters/prompts.jsonl$", re.MULTILINE))


def test_an_untouched_form_says_what_is_to_choose_without_complaints(visit, platform):
    from oppo_platform.cluster.models import CatalogueItem

    visitor = visit()
    CatalogueItem.objects.all().delete()  # a worker is connected, and has no models
    page = visitor.page
    try:
        page.goto("/runs/new")
        expect(page.locator("#problems")).to_contain_text("To choose: Actor")
        assert page.locator("[aria-invalid=true]").count() == 0
        assert page.locator("text=No worker is connected").count() == 0
        expect(page.locator("#why-not")).to_have_text("Complete the form to submit.")
        page.focus("#send")
        page.keyboard.press("Enter")
        expect(page.locator("[data-field='models.actor'] .error")).to_be_visible()
    finally:
        platform.fleet.beat()


def test_a_small_batch_lowers_what_nobody_set(visit, platform):
    page = open_form(visit)
    page.fill("[data-path='ppo.batch_size']", "4")
    page.wait_for_selector(READY)
    expect(page.locator("[data-path='overlap.overcommit.max']")).to_have_attribute("placeholder", "4")
    expect(page.locator("#plan-flight")).to_have_text("8")
    page.fill("[data-path='overlap.overcommit.max']", "6")
    problem = page.locator("#problems li")
    expect(problem).to_contain_text("Max extra rollouts in flight (Δ) overlap.overcommit.max is above ppo.batch_size")


def test_names_of_other_frameworks_are_suggested_and_a_broken_text_has_no_plan(visit, platform):
    page = open_form(visit)
    page.click("[data-view=yaml]")
    text = page.input_value("#yaml")
    page.fill("#yaml", text.replace("learning_rate:", "lr:", 1))
    expect(page.locator("#problems")).to_contain_text("Did you mean ppo.learning_rate?")
    for typed, meant in (
        ("bs: 8", "ppo.batch_size"),
        ("kl_coef: 0.1", "ppo.kl.coefficient"),
        ("max_length: 64", "rollout.max_new_tokens"),
    ):
        page.fill("#yaml", f"{text}\n{typed}\n")
        expect(page.locator("#problems")).to_contain_text(f"Did you mean {meant}?")
    page.fill("#yaml", text + "\n  : : [")
    expect(page.locator("#plan-answers")).to_have_text("–")
    page.fill("#yaml", text)
    page.wait_for_selector(READY)
    expect(page.locator("#plan-answers")).not_to_have_text("–")


def test_a_name_has_any_characters(visit, platform):
    name = "llama3/8b lr=1e-5 #2: α + ö 🎉"
    page = open_form(visit)
    page.fill("[data-path=name]", name)
    page.wait_for_selector(READY)
    page.click("#send")
    page.wait_for_url(re.compile(r"/runs/\d+$"))
    expect(page.locator("h1")).to_contain_text(name)
    assert Run.objects.latest("pk").name == name

"""What the pages' views decide: whose runs are shown, who may change a team, what the form starts from, how figures read."""

from __future__ import annotations

import json
import re
from html import unescape

import pytest

from oppo_contract import load_spec
from oppo_contract.wire import CatalogueEntry
from oppo_platform.accounts.models import Membership
from oppo_platform.pages import spec_form
from oppo_platform.pages.templatetags import oppo_format
from oppo_platform.projects.models import Project


@pytest.fixture
def browser(world):
    """Ada's."""
    return world.login("ada")


def embedded(reply, name):
    """The JSON that a page carries for its script."""
    found = re.search(rf'<script id="{name}" type="application/json">(.*?)</script>', reply.content.decode(), re.S)
    return json.loads(found[1])


def test_a_run_of_another_team_does_not_exist(world, browser):
    run = world.submit(name="a secret of ours")
    stranger = world.login("eve")
    for tab in ("", "/timeline", "/utilization", "/samples", "/logs", "/config", "/checkpoints", "/events"):
        assert browser.get(f"/runs/{run.pk}{tab}").status_code == 200
        assert stranger.get(f"/runs/{run.pk}{tab}").status_code == 404
    assert stranger.get(f"/runs/new?from={run.pk}").status_code == 404
    assert run.name not in stranger.get("/runs").content.decode()
    assert run.name not in stranger.get("/queue").content.decode()
    assert stranger.get(f"/runs/{run.pk}/samples/side-by-side").status_code == 404
    for page in ("/compare", "/compare/samples"):
        assert f'value="{run.pk}"' in browser.get(page).content.decode()
        assert f'value="{run.pk}"' not in stranger.get(page).content.decode()


def test_a_run_of_several_ranks_says_whose_work_is_drawn(world, browser):
    several = {"kind": "cpu", "processes": 2}
    told = [world.submit(resources=resources) for resources in ({}, several)]
    for tab in ("timeline", "utilization"):
        one, two = (browser.get(f"/runs/{run.pk}/{tab}").content.decode() for run in told)
        assert "processes train this run" not in one
        assert "2 processes train this run. This page shows rank 0" in two


def test_a_run_of_before_the_rules_became_stricter_has_its_pages(world, browser):
    run = world.submit()
    run.spec["resources"] = {"devices": 3, "nodes": 2, "given_up_since": True}
    run.save(update_fields=["spec"])
    for name in ("", "/timeline", "/utilization", "/samples", "/logs", "/config", "/checkpoints", "/events"):
        assert browser.get(f"/runs/{run.pk}{name}").status_code == 200, name


def test_a_spec_is_shown_whole_or_without_its_defaults(world, browser, make_spec):
    from oppo_contract.spec import load_spec
    from oppo_contract.yaml_text import parse_yaml
    from oppo_platform.runs.selectors import spec_yaml

    run = world.submit(name="named", steps=7)
    whole, only_set = parse_yaml(spec_yaml(run)), parse_yaml(spec_yaml(run, only_set=True))
    assert (only_set["name"], only_set["steps"], "logging" in whole, "logging" in only_set) == ("named", 7, True, False)
    page = browser.get(f"/runs/{run.pk}/config?only=set").content.decode()
    assert "steps: 7" in page
    assert "samples_per_step" not in page.split("<pre")[1].split("</pre>")[0]
    client_copy = browser.get(f"/api/v1/runs/{run.pk}/spec.yaml")
    assert parse_yaml(client_copy.content.decode()) == whole
    assert load_spec(only_set).model_dump(mode="json") == whole


def test_the_list_filters_and_pages(world, browser):
    runs = [world.submit(name=f"run {number}") for number in range(55)]
    first = browser.get("/runs").content.decode()
    assert first.count('<tr id="run-') == 50
    older = unescape(re.search(r'href="(\?[^"]*cursor=[\w-]+)"', first)[1])
    assert browser.get(f"/runs{older}").content.decode().count('<tr id="run-') == 5
    assert browser.get("/runs?part=rows").content.decode().count('<tr id="run-') == 50
    assert "<h2>No runs</h2>" in browser.get("/runs?show=failed").content.decode()
    assert browser.get(f"/runs?project={runs[0].project_id}&show=waiting").status_code == 200
    for wrong in ("show=x", "project=x", "cursor=-1", "project=9999999999999999999999"):
        assert browser.get(f"/runs?{wrong}").status_code == 404


def test_viewers_find_no_button_that_they_may_not_press(world):
    run = world.submit()
    page = world.login("vic").get(f"/runs/{run.pk}").content.decode()
    assert "wish-dialog" not in page
    assert "/runs/new?from=" not in page
    assert "No project to submit to" in world.login("vic").get("/runs/new").content.decode()
    assert "wish-dialog" in world.login("max").get(f"/runs/{run.pk}").content.decode()


def test_names_are_text(world, browser):
    world.people["ada"].username = "<b>ada</b>"
    world.people["ada"].save()
    world.submit()
    for path in ("/runs", f"/teams/{world.team.pk}", "/queue"):
        assert "<b>ada</b>" not in browser.get(path).content.decode()


@pytest.mark.parametrize(("who", "status"), [("ada", 302), ("ben", 302), ("vic", 403), ("eve", 404)])
def test_members_make_projects(world, who, status):
    reply = world.login(who).post(f"/teams/{world.team.pk}/projects", {"name": "Poems"})
    assert reply.status_code == status
    assert Project.objects.filter(team=world.team, name="Poems").exists() == (status == 302)


@pytest.mark.parametrize(
    ("who", "whom", "role", "status", "changed"),
    [
        ("ada", "eve", "member", 302, True),
        ("max", "eve", "viewer", 403, False),  # maintainers steer runs; owners manage people
        ("ben", "eve", "member", 403, False),
        ("ada", "ada", "viewer", 422, False),  # a team keeps an owner
        ("ada", "nobody", "member", 422, False),
        ("ada", "eve", "king", 422, False),
        ("eve", "eve", "owner", 404, False),
    ],
)
def test_permission_to_manage_members(world, who, whom, role, status, changed):
    def members():
        return set(Membership.objects.filter(team=world.team).values_list("user__username", "role"))

    before = members()
    reply = world.login(who).post(f"/teams/{world.team.pk}/members", {"user": whom, "role": role})
    assert reply.status_code == status
    assert members() - before == ({(whom, role)} if changed else set())


def test_the_form_starts_from_what_a_worker_offers(world, browser):
    world.worker()
    reply = browser.get("/runs/new")
    data = embedded(reply, "submit-data")
    spec = load_spec(data["spec"])
    assert (spec.models.actor.path, spec.models.reward.model.path, spec.data.prompts) == (
        "actors/small",
        "rewards/small",
        "letters",
    )
    assert browser.post("/api/v1/runs", {"spec": data["spec"]}, content_type="application/json").status_code == 201
    run = world.submit(name="the first", seed=7)
    fork = embedded(browser.get(f"/runs/new?from={run.pk}"), "submit-data")["spec"]
    assert (fork["name"], fork["seed"]) == ("the first fork", 7)


def test_the_form_starts_within_a_small_models_context():
    actor = CatalogueEntry(id="tiny/actor", kind="model", bytes=1, task="causal_lm", context=100)
    rollout = spec_form.starting_spec([actor])["rollout"]
    assert rollout["max_prompt_tokens"] + rollout["max_new_tokens"] == 100


MODEL = CatalogueEntry(id="smollm2/model", kind="model", bytes=1, task="causal_lm", context=8192)
PROMPTS = CatalogueEntry(id="smollm2/sentiment.jsonl", kind="prompts", bytes=1, rows=64)
HELD_OUT = PROMPTS.model_copy(update={"id": "smollm2/sentiment-heldout.jsonl"})


def test_an_example_is_ready_when_a_worker_has_its_model_and_prompts():
    def states(*catalogue):
        return [present for _, present in spec_form.example_runs(list(catalogue))[0].needs]

    assert states() == [False, False, False]
    assert states(MODEL) == [True, False, False]
    assert states(MODEL.model_copy(update={"problem": "it is a link"}), PROMPTS, HELD_OUT) == [False, True, True]
    assert states(MODEL, PROMPTS, HELD_OUT) == [True, True, True]


@pytest.mark.parametrize("catalogue", [[], [MODEL, PROMPTS, HELD_OUT]], ids=["empty", "the example's only"])
def test_the_form_starts_from_an_example_where_nothing_else_can_be_run(catalogue):
    assert spec_form.starting_spec(catalogue)["models"]["actor"]["path"] == "smollm2/model"


def test_the_first_pages_tell_the_command_and_tick_it_off(world, browser, make_entry):
    empty = browser.get("/runs").content.decode()
    assert "oppo example smollm2" in empty
    assert 'href="/runs/new?preset=sentiment"' in empty
    assert "Done" not in empty
    assert "oppo example smollm2" not in world.login("vic").get("/runs").content.decode()  # who cannot submit
    made = [entry.model_dump(mode="json") for entry in (MODEL, HELD_OUT, PROMPTS)]
    world.worker(catalogue=made)
    part = browser.get("/runs/new?part=examples")
    assert "Done" in part.content.decode()
    assert embedded(part, "catalogue") == made
    assert "Done" in browser.get("/runs").content.decode()


def test_the_form_starts_from_the_example_that_the_address_names(world, browser):
    world.worker()
    named = embedded(browser.get("/runs/new?preset=sentiment"), "submit-data")
    assert load_spec(named["spec"]).name == "smollm2 sentiment"
    assert browser.get("/runs/new?preset=elsewhere").status_code == 404
    run = world.submit()
    assert embedded(browser.get(f"/runs/new?from={run.pk}"), "submit-data")["examples"] == []


def test_every_field_of_the_form_is_in_the_schema():
    fields = [field for group in spec_form.GROUPS for field in group.fields]
    assert all(field.help for field in fields)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "–"), (3.42, "3.4 s"), (48, "48 s"), (400, "6 m 40 s"), (7980, "2 h 13 m"), (273600, "3 d 4 h"), (float("nan"), "–")],
)
def test_durations_read_as_people_say_them(seconds, words):
    assert oppo_format.duration(seconds) == words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("as many as `nodes`.", "as many as <code>nodes</code>."),
        ("`a` and `<b>`", "<code>a</code> and <code>&lt;b&gt;</code>"),
        ("<i>one ` alone", "&lt;i&gt;one ` alone"),
        ("", ""),
    ],
)
def test_words_between_backticks_are_code_and_nothing_is_mark_up(text, shown):
    assert oppo_format.ticked(text) == shown


def test_figures_and_sparklines():
    assert oppo_format.fixed(-1.234) == "−1.23"
    assert oppo_format.fixed(float("inf")) == "–"
    assert oppo_format.percent(0.2081) == "20.8 %"
    assert oppo_format.spark_points([1.0]) == ""
    assert oppo_format.spark_points([0.0, None, 1.0]) == "2.0,20.0 82.0,2.0"
    assert oppo_format.spark_points([5.0, 5.0]).split()[0] == "2.0,2.0"

"""The checklist of an empty list of runs: what is there, what to do, whom to ask, and what other teams must not learn."""

from __future__ import annotations

import re

import pytest

from oppo_contract.wire import CatalogueEntry
from oppo_platform.accounts.models import Membership, Role
from oppo_platform.pages import spec_form
from oppo_platform.pages.first_run import shorten

MODEL = CatalogueEntry(id="mine/actor", kind="model", bytes=1, task="causal_lm", context=8192)
PROMPTS = CatalogueEntry(id="mine/prompts.jsonl", kind="prompts", bytes=1, rows=64)
REWARD = CatalogueEntry(id="mine/judge", kind="model", bytes=1, task="sequence_classification")
RULES = [CatalogueEntry(id=name, kind="rule", bytes=0) for name in sorted(spec_form.BUILT_IN_RULES)]


def as_data(*entries):
    return [entry.model_dump(mode="json") for entry in entries]


def part(world, who="ada"):
    """The fragment, by item: {key: (done, text)}."""
    page = world.login(who).get("/runs?part=first-run").content.decode()
    found = re.findall(r'<li id="first-(\w+)"( data-done)?>(.*?)(?=<li id="first-|\Z)', page, re.S)
    return {key: (bool(done), " ".join(re.sub(r"<[^>]+>", " ", text).split())) for key, done, text in found}


def done(items):
    return [key for key, (there, _) in items.items() if there]


def test_nothing_is_there_at_first_and_every_step_has_its_command(world):
    world.people["ada"].is_staff = True
    world.people["ada"].save()
    items = part(world)
    assert list(items) == ["worker", "model", "prompts", "reward", "submit"]
    assert done(items) == []
    assert "oppo worker join http://testserver TOKEN --models-root FOLDER" in items["worker"][1]
    assert "oppo example smollm2" in items["model"][1]


def test_items_are_ticked_with_what_is_there(world):
    worker = world.worker("node-1", devices=2, catalogue=[])
    assert done(part(world)) == ["worker"]
    assert "node-1, 2 CPU devices" in part(world)["worker"][1]
    worker.heartbeat(2, catalogue=as_data(MODEL))
    assert done(part(world)) == ["worker", "model"]
    worker.heartbeat(2, catalogue=as_data(MODEL, PROMPTS, *RULES))
    items = part(world)
    assert done(items) == ["worker", "model", "prompts", "reward"]
    assert "mine/actor" in items["model"][1]
    assert "mine/prompts.jsonl" in items["prompts"][1]
    assert "rule sentiment:compound" in items["reward"][1]
    assert "4 of 4 ready" in " ".join(world.login("ada").get("/runs").content.decode().split())


def test_what_no_run_can_use_ticks_nothing(world):
    broken = [entry.model_copy(update={"problem": "it is a link"}) for entry in (MODEL, PROMPTS, REWARD)]
    world.worker(catalogue=as_data(*broken))
    assert done(part(world)) == ["worker"]


def test_a_worker_that_went_away_is_not_connected(world):
    world.worker(catalogue=as_data(MODEL, PROMPTS, REWARD))
    assert len(done(part(world))) == 4
    world.clock.advance(3600)
    assert done(part(world)) == []


def test_who_cannot_do_a_step_learns_whom_to_ask(world):
    world.people["max"].is_staff = True
    world.people["max"].save()
    member = part(world, "ben")
    assert "Ask a cluster administrator (max) to connect a worker" in member["worker"][1]
    assert "oppo worker join" not in member["worker"][1]
    assert "oppo example smollm2" in member["model"][1]
    viewer = part(world, "vic")
    assert "oppo" not in viewer["model"][1]
    assert "Ask a cluster administrator (max)" in viewer["prompts"][1]
    assert "ask a team owner (ada) for the role member" in viewer["submit"][1]
    assert "/runs/new" not in world.login("vic").get("/runs?part=first-run").content.decode()


def test_administrators_and_owners_of_other_teams_are_not_named(world):
    world.people["max"].is_staff = True
    world.people["max"].save()
    Membership.objects.filter(user=world.people["eve"]).update(role=Role.VIEWER)
    stranger = part(world, "eve")
    assert "Ask a cluster administrator to connect a worker" in stranger["worker"][1]
    text = " ".join(words for _, words in stranger.values())
    assert [name for name in ("ada", "ben", "max") if re.search(rf"\b{name}\b", text)] == []


def test_the_first_run_ends_the_checklist_for_its_team_only(world):
    page = world.login("ada")
    assert 'id="first-run"' in page.get("/runs").content.decode()
    run = world.submit(name="the secret of Letters")
    reply = page.get("/runs?part=first-run")
    assert (reply.headers["HX-Refresh"], reply.content) == ("true", b"")
    assert 'id="first-run"' not in page.get("/runs").content.decode()
    stranger = world.login("eve")
    reply = stranger.get("/runs?part=first-run")
    assert "HX-Refresh" not in reply.headers
    assert run.name not in reply.content.decode()
    assert "first-run" in stranger.get("/runs").content.decode()


def test_who_is_in_no_team_learns_nothing_about_the_workers(world):
    world.worker("node-1", catalogue=as_data(MODEL, PROMPTS))
    Membership.objects.filter(user=world.people["eve"]).delete()
    reply = world.login("eve").get("/runs?part=first-run")
    assert (reply.headers["HX-Refresh"], reply.content) == ("true", b"")
    page = world.login("eve").get("/runs").content.decode()
    assert "No project yet" in page
    assert [name for name in ("node-1", "mine/", "first-run") if name in page] == []


def test_the_other_teams_run_on_a_worker_is_not_named(world):
    run, _ = world.start(world.worker(), name="the secret of Letters")
    text = world.login("eve").get("/runs").content.decode()
    assert 'id="first-run"' in text
    assert run.name not in text


def test_the_submit_page_leads_to_the_checklist_while_something_lacks(world):
    page = world.login("ada")
    assert 'href="/runs#first-run"' in page.get("/runs/new").content.decode()
    worker = world.worker(catalogue=as_data(MODEL))
    text = page.get("/runs/new").content.decode()
    assert "Missing: Prompts; A reward: a model or a rule." in text
    assert 'href="/runs#first-run"' in text
    worker.heartbeat(catalogue=as_data(MODEL, PROMPTS, REWARD))
    assert "first-run" not in page.get("/runs/new").content.decode()
    world.submit()
    worker.heartbeat(catalogue=[])
    assert "first-run" not in page.get("/runs/new").content.decode()  # the checklist is gone


@pytest.mark.parametrize(
    ("entries", "reward"),
    [
        ((REWARD, *RULES), {"model": {"path": "mine/judge"}}),
        (RULES, {"rule": "sentiment:compound"}),
        ((*RULES, RULES[0].model_copy(update={"id": "mine:happy"})), {"rule": "mine:happy"}),
        (RULES[:1], {"model": {"path": ""}}),
    ],
    ids=["a reward model", "built-in rules", "a rule of one's own", "only rules of examples"],
)
def test_the_form_starts_with_the_reward_that_is_there(entries, reward):
    assert spec_form.starting_spec([MODEL, PROMPTS, *entries])["models"]["reward"] == reward


def test_long_lists_are_shortened():
    assert shorten(["a", "b", "c"]) == "a, b, c"
    assert shorten(["a", "b", "c", "d", "e"]) == "a, b, c, 2 more"

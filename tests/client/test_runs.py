"""Runs from a notebook, against a real platform: submitted, found, steered, tagged, forked."""

from __future__ import annotations

import pytest

from oppo_client import Client, Conflict, Forbidden, NotFound, Refused, Run, Unauthenticated

YAML = """\
name: from a file
steps: 12
models:
  actor: {path: letters/actor}
  reward: {model: {path: letters/reward}}
  critic: reward
data: {prompts: letters/prompts.jsonl}
rollout: {max_new_tokens: 512, max_prompt_tokens: 64}
ppo: {learning_rate: 1e-5}
"""


def test_a_file_with_overrides_becomes_a_run(client, live, tmp_path):
    file = tmp_path / "ppo.yaml"
    file.write_text(YAML)
    run = client.submit(file, project=live.project.name, overrides={"overlap.overcommit.max": 8, "name": "wider", "seed": 7})
    assert (run.name, run.state, run.total_steps, run.project) == ("wider", "queued", 12, live.project.name)
    spec = run.spec()
    assert (spec["overlap"]["overcommit"]["max"], spec["seed"], spec["ppo"]["learning_rate"]) == (8, 7, 1e-5)
    assert spec == client.validate(yaml=run.spec_yaml())["spec"]
    again = client.submit(str(file))
    assert again.id != run.id
    assert f"project={live.project.pk})" in run.spec_python(), "a name may be that of another team's project"
    assert again.url == f"{live.web.url}/runs/{again.id}"


def test_overrides_do_what_the_same_words_in_the_file_do(client, live):
    """Defaults are filled in before a setting is changed: none of them may hang on another setting."""
    batch = "ppo: {learning_rate: 1e-5, batch_size: 8}"
    changed = client.validate(yaml=YAML, overrides={"ppo.batch_size": 8, "overlap.overcommit.max": 6})
    written = client.validate(yaml=YAML.replace("ppo: {learning_rate: 1e-5}", batch) + "overlap: {overcommit: {max: 6}}")
    assert changed["ok"]
    plans = [reply.pop("plan") for reply in (changed, written)]
    assert changed == written
    assert plans[0]["memory"] == plans[1]["memory"], "the notebook gets the plan as well"


def test_every_complaint_comes_with_its_path(client, spec):
    with pytest.raises(Refused) as refused:
        client.submit(spec(), overrides={"ppo.batch_sizes": 8, "steps": -1})
    problems = {problem.path: problem for problem in refused.value.errors}
    assert problems.keys() == {"ppo.batch_sizes", "steps"}
    assert problems["ppo.batch_sizes"].suggestion == "batch_size"
    assert "did you mean: batch_size" in str(refused.value)
    assert refused.value.request_id
    assert refused.value.request_id in str(refused.value)
    with pytest.raises(Refused, match="not valid YAML"):
        client.submit(yaml="a: [", overrides={"steps": 3})
    with pytest.raises(Refused, match=r"name is not a section"):
        client.submit(spec(), overrides={"name.first": 3})
    assert [problem["path"] for problem in client.validate(spec(steps=-1))["problems"]] == ["steps"]


def test_invalid_spec_source_is_refused_before_any_request(client):
    with pytest.raises(TypeError, match="yaml="):
        client.submit("steps: 3\nname: x")
    with pytest.raises(TypeError, match="its text"):
        client.submit()
    with pytest.raises(FileNotFoundError):
        client.submit("nowhere.yaml")


def test_runs_are_listed_page_by_page(client, spec, monkeypatch):
    from oppo_client import pagination

    monkeypatch.setattr(pagination, "PAGE", 2)
    born = [client.submit(spec(f"listed {i}", seed=i)).tag("paged") for i in range(5)]
    found = list(client.runs(filter="tag:paged"))
    assert found == born[::-1]
    assert found[0].tags == ["paged"]
    assert list(client.runs("tag:paged", sort="name")) == born
    assert {run.state for run in client.runs(state=["queued"])} == {"queued"}
    with pytest.raises(Refused) as refused:
        list(client.runs("state:flying"))
    assert refused.value.more["term"]


def test_a_run_is_steered(client, spec):
    run = client.submit(spec())
    assert run.set_priority(80).priority == 80
    assert run.pause().state == "paused"
    assert client.get(run.id).state == "paused"
    assert run.resume().state == "queued"
    with pytest.raises(Conflict) as refused:
        run.resume()
    assert refused.value.detail
    assert run.tag("a", "b").tag("c", remove=["a"]).tags == ["b", "c"]
    assert run.pin().unpin() is run
    assert run.silence().summary["silent"] is True
    assert run.cancel().ended
    gone = run.delete()
    assert gone["restorable_until"]
    with pytest.raises(NotFound):
        client.get(run.id)
    assert run.restore().state == "cancelled"
    assert "cancelled" in [event["new"] for event in run.events(["state"])]


def test_waiting_run_has_a_reason(client, live, spec):
    first, second = client.submit(spec("first")), client.submit(spec("second"))
    live.start(first.id)  # and the scheduler has planned
    table = client.queue(frame=False)
    assert table["run"] == [second.id]
    assert table["text"][0]
    (node,) = client.cluster()
    assert [device["run"]["id"] for device in node["devices"]] == [first.id]


def test_a_fork_has_the_same_spec_and_what_is_changed(client, live, spec):
    run = client.submit(spec("mother", seed=3))
    fork = run.fork({"seed": 4, "ppo.batch_size": 32})
    assert (fork.name, fork.project) == ("mother fork", run.project)
    was, now = run.spec(), fork.spec()
    assert (now["seed"], now["ppo"]["batch_size"]) == (4, 32)
    assert {key for key in was if was[key] != now[key]} == {"name", "seed", "ppo"}


def test_a_fork_begins_with_a_checkpoint(client, live, spec, save):
    mother = client.submit(spec("mother", steps=10))
    supervisor, story = live.start(mother.id)
    supervisor.tell(list(story.tell(4)))
    save(supervisor, 4)
    fork = mother.checkpoint().fork({"steps": 30}, name="from four")
    assert (fork.summary["forked_from"], fork.total_steps, fork.name) == ({"run": mother.id, "step": 4}, 30, "from four")
    with pytest.raises(Refused) as refused:
        mother.fork(step=5)
    assert [error.path for error in refused.value.errors] == ["fork.step"]


def test_forbidden_calls(live, token_of, client, spec):
    run = client.submit(spec())
    with Client(live.web.url, token_of("read")) as reader:
        assert reader.get(run.id) == run
        assert reader.validate(spec())["ok"]
        with pytest.raises(Forbidden, match="submit"):
            reader.get(run.id).cancel()
        assert reader.me()["token"]["scope"] == "read"
    with Client(live.web.url, "oppo_user_nobody_knows") as stranger, pytest.raises(Unauthenticated):
        stranger.me()
    with pytest.raises(NotFound):
        client.get(10**9)


def test_representations_say_what_it_is_and_no_secret(client, live, token, spec):
    run = client.submit(spec("shown"))
    assert repr(run) == f"<Run {run.id} 'shown' queued step 0/20>"
    run.summary |= dict.fromkeys(("name", "state", "reason", "error", "url"), '"><script>alert(1)</script>')
    shown = run._repr_html_()
    assert "<script>" not in shown
    assert shown.count("&lt;script&gt;") == 5
    assert token not in repr(client) + repr(vars(client)) + repr(run)
    assert isinstance(run, Run)
    assert len({run, client.get(run.id)}) == 1


def test_the_python_snippet_submits_the_same_spec(client, live, token, monkeypatch, capsys):
    run = client.submit(yaml=YAML, project=live.project.name)
    monkeypatch.setenv("OPPO_URL", live.web.url)
    monkeypatch.setenv("OPPO_TOKEN", token)
    scope = {}
    exec(run.spec_python(), scope)
    again = scope["run"]
    assert again.id != run.id
    assert (again.spec(), again.project) == (run.spec(), run.project)
    assert capsys.readouterr().out.strip() == again.url
    scope["client"].close()

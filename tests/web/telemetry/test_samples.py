"""Recorded answers over the API: conditions, order, pages, search, the same prompt, and who may read them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from oppo_contract.events import Sample
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.telemetry.models import SampleRow
from oppo_platform.telemetry.search import search_terms


def answer(number, **facts):
    """A sample as an engine tells it."""
    told = {"sequence_id": number, "prompt": f"prompt {number % 3}", "response": f"answer {number}", "stale_response": ""}
    told |= {"score": number / 10, "kl": 0.5, "length": 10 + number, "age": number % 2, "versions": [number, number + 1]}
    return {**told, "ending": "length" if number % 4 == 0 else "eos", "held_out": False, **facts}


def samples_event(seq, step, *samples):
    return {"kind": "samples", "producer": "engine", "seq": seq, "time": 1.0, "step": step, "samples": list(samples)}


@pytest.fixture
def told(world, events):
    """(world, worker, run, attempt id, get): a run with twelve answers of six steps; `get` asks the API as vic, a viewer."""
    worker = world.worker()
    run, attempt_id = world.start(worker)
    batch = [events.started(1), *(events.step(1 + step, step, m=1.0) for step in range(1, 7))]
    batch += [samples_event(7 + step, step, answer(2 * step), answer(2 * step + 1)) for step in range(1, 7)]
    assert worker.send_events(attempt_id, batch).status_code == 200
    client = world.login("vic")

    def get(path="", **query):
        return client.get(f"/api/v1/runs/{run.pk}/samples{path}", query)

    return world, worker, run, attempt_id, get


def numbers(reply):
    return [item["sequence_id"] for item in reply.json()["items"]]


def test_samples_newest_first_with_all_fields(told):
    get = told[-1]
    assert numbers(get()) == list(range(13, 1, -1))
    first = get(limit=1).json()["items"][0]
    assert {key: first[key] for key in answer(13)} == answer(13)
    assert (first["step"], len(first["prompt_key"])) == (6, 32)


CONDITIONS = [
    ({"step": 3}, [7, 6]),
    ({"from_step": 2, "to_step": 3}, [7, 6, 5, 4]),
    ({"min_score": 1.05, "max_score": 1.25}, [12, 11]),
    ({"min_age": 1, "to_step": 2}, [5, 3]),
    ({"max_age": 0, "to_step": 2}, [4, 2]),
    ({"ending": "length"}, [12, 8, 4]),
    ({"held_out": "true"}, []),
    ({"q": '"ANSWER 1"'}, [13, 12, 11, 10]),
    ({"q": '"prompt 0" answer'}, [12, 9, 6, 3]),
    ({"q": "%"}, []),
    ({"q": "\0"}, []),
]


def test_every_condition_must_hold(told):
    for query, found in CONDITIONS:
        assert numbers(told[-1](**query)) == found, query


def test_pages_join_to_the_whole_in_every_order(told):
    *_, attempt_id, get = told
    SampleRow.objects.create(attempt_id=attempt_id, step=6, data=answer(99, score=None, kl=None, ending=None))
    for by in ("step", "score", "kl", "length", "age", "version", "ending"):
        for sign in ("", "-"):
            seen = pages(get, f"{sign}{by}")
            values = [item["versions"][0] if by == "version" else item[by] for item in seen]
            ranked = [(value is not None, 0 if value is None else value) for value in values]
            assert ranked == sorted(ranked, reverse=bool(sign)), (sign, by)
            assert len({item["id"] for item in seen}) == len(seen) == 13


def pages(get, sort):
    seen, cursor = [], ""
    while cursor is not None:
        page = get(sort=sort, limit=5, cursor=cursor).json()
        seen += page["items"]
        cursor = page["next"]
    return seen


def test_invalid_parameters_are_422(told):
    ending = told[-1](sort="ending", limit=1).json()["next"]
    queries = [{"cursor": cursor} for cursor in ("x", "W10", "WyJhIiwgMV0", "é", ending)]
    queries += [{"sort": "reward"}, {"step": 2**40}, {"min_score": "nan"}, {"ending": "x"}, {"prompt": "x"}]
    for query in queries:
        assert told[-1](**query).status_code == 422, query


def test_search_knows_other_scripts_and_both_cases(told):
    *_, attempt_id, get = told
    SampleRow.objects.create(
        attempt_id=attempt_id, step=6, data=answer(99, prompt="Ärger über ÖL", response="海は今日も灰色です")
    )
    assert numbers(get(q="灰色")) == numbers(get(q="ärger öl")) == numbers(get(q="ÜBER")) == [99]


def test_excerpts_begin_shortly_before_the_first_hit(told):
    *_, attempt_id, get = told
    long = "x" * 500 + " zebra " + "y" * 500
    SampleRow.objects.create(attempt_id=attempt_id, step=6, data=answer(99, response=long, prompt="short", stale_response="x"))
    (item,) = get(q="ZEBRA", excerpt=100).json()["items"]
    assert item["response"] == "… " + long[461:561] + " …"
    assert item["excerpt_start"] == 461
    assert (item["prompt"], "stale_response" in item) == ("short", False)
    assert get(q="zebra").json()["items"][0]["response"] == long
    (item,) = get(q="xxx", excerpt=100).json()["items"]
    assert (item["response"], item["excerpt_start"]) == ("x" * 100 + " …", 0)
    (item,) = get(q="zebra", excerpt=len(long)).json()["items"]
    assert (item["response"], item["excerpt_start"]) == (long, None)


def test_an_answer_knows_the_others_to_its_prompt(told):
    *_, get = told
    newest = get(limit=1).json()["items"][0]
    whole = get(f"/{newest['id']}").json()
    assert [other["step"] for other in whole["same_prompt"]] == [2, 3, 5, 6]
    assert whole["same_prompt"][-1]["id"] == newest["id"]
    assert "response" in whole
    assert "response" not in whole["same_prompt"][0]
    assert numbers(get(prompt=newest["prompt_key"])) == [13, 10, 7, 4]


def test_a_newer_attempts_answers_replace_the_older_ones(told, events):
    world, worker, run, first, get = told
    hidden = get(step=6).json()["items"][0]["id"]
    url = f"{artifact_url(run.pk)}/checkpoints/step-00000004"
    worker.attempt(first, "checkpoints", {"epoch": 1, "step": 4, "url": url, "manifest_sha256": "0", "bytes": 1})
    worker.attempt(first, "outcome", {"epoch": 1, "outcome": "engine_died", "reason": "killed"})
    world.clock.advance(5)  # the back-off
    world.cycle()
    second = run.attempts.get(epoch=2).pk
    worker.claim(second, 2)
    worker.send_events(second, [events.started(1, 4), events.step(2, 5, m=1.0), samples_event(3, 5, answer(50))])
    assert numbers(get()) == [50, 9, 8, 7, 6, 5, 4, 3, 2]
    assert get(f"/{hidden}").status_code == 404


def test_another_teams_answers_do_not_exist(told):
    world, _, run, _, get = told
    one = get(limit=1).json()["items"][0]["id"]
    other_run = world.submit()
    eve, vic = world.login("eve"), world.login("vic")
    for path in (f"runs/{run.pk}/samples", f"runs/{run.pk}/samples/{one}"):
        assert eve.get(f"/api/v1/{path}").status_code == 404
        assert vic.get(f"/api/v1/{path}").status_code == 200
    assert vic.get(f"/api/v1/runs/{other_run.pk}/samples/{one}").status_code == 404
    assert get(f"/{10**30}").status_code == 404
    assert eve.get(f"/runs/{run.pk}/samples").status_code == 404


def test_search_terms():
    assert search_terms('the "grey sea" is') == ["the", "grey sea", "is"]
    assert search_terms('a "b') == ["a", '"b']
    assert len(search_terms("w " * 50)) == 10


CHAT = [{"role": "system", "content": "Answer in verse."}, {"role": "user", "content": "Tell me about <b>the sea</b>."}]


def test_chat_turns_are_stored_searched_and_tell_prompts_apart(told, events):
    _, worker, _, attempt_id, get = told
    same_end = [{"role": "system", "content": "Answer in prose."}, CHAT[1]]
    plain = {"prompt": CHAT[1]["content"]}
    samples = [answer(90, **plain, messages=CHAT), answer(91, **plain, messages=same_end), answer(92, **plain)]
    assert worker.send_events(attempt_id, [events.step(14, 7, m=1.0), samples_event(15, 7, *samples)]).status_code == 200
    items = {item["sequence_id"]: item for item in get(step=7).json()["items"]}
    assert [items[number]["messages"] for number in (90, 91, 92)] == [CHAT, same_end, None]
    assert len({item["prompt_key"] for item in items.values()}) == 3
    assert numbers(get(q="VERSE")) == [90]
    assert "messages" not in get(q="verse", excerpt=100).json()["items"][0]
    assert get(f"/{items[90]['id']}").json()["messages"] == CHAT


def test_chat_turns_are_bounded():
    sample = {key: value for key, value in answer(1).items() if key != "held_out"}
    unknown_key = [{"role": "user", "content": "x", "name": "y"}]
    for messages in ([{"role": "", "content": "x"}], [{"role": "user"}], unknown_key, [CHAT[0]] * 1001):
        with pytest.raises(ValidationError, match="messages"):
            Sample.model_validate({**sample, "messages": messages})

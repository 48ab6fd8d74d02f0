"""Samples side by side: columns of runs and steps, order, filter, pages, export and access."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_platform.runs.attempts import artifact_url
from oppo_platform.telemetry import sample_comparison
from oppo_platform.telemetry.models import SampleRow
from oppo_platform.telemetry.sample_columns import (
    MOST_COLUMNS,
    Column,
    TooManyColumns,
    choose_columns,
    offered_steps,
    reward_change,
    thin_out,
)
from tests.web.telemetry.test_samples import answer, samples_event

EVALUATED = {"evaluation": {"prompts": "letters", "every_steps": 2}}


def evaluated(step, *scores, **facts):
    """An evaluation's samples: prompt n, its response and its reward; None leaves it out."""
    return [
        answer(n, prompt=f"held out {n}", response=f"step {step} of {n}", score=score, held_out=True, **facts)
        for n, score in enumerate(scores)
        if score is not None
    ]


@pytest.fixture
def compared(world, events):
    """`start(held_out, trained)` makes a run with these samples, by step; `get` asks the API as vic, a viewer."""
    client = world.login("vic")

    class Compared:
        def __init__(self):
            self.world = world

        def start(self, held_out, trained=None, **spec):
            worker = world.worker(f"node{len(world.people)}-{id(held_out)}")
            run, attempt_id = world.start(worker, **{**EVALUATED, **spec})
            seq, batch = itertools.count(2), [events.started(1)]
            for step in range(max([1, *held_out, *(trained or {})]) + 1):
                if step:
                    batch.append(events.step(next(seq), step, m=1.0))
                for samples in (held_out.get(step), (trained or {}).get(step)):
                    if samples:
                        batch.append(samples_event(next(seq), step, *samples))
            assert worker.send_events(attempt_id, batch).status_code == 200
            return run, attempt_id, worker

        def get(self, *runs, path="compare/samples", **query):
            return client.get(f"/api/v1/{path}", {"runs": ",".join(str(run.pk) for run in runs), **query})

    return Compared()


def steps_of(page):
    """The steps of the responses, a list per prompt; None without a response."""
    return [[sample and sample["step"] for sample in prompt["samples"]] for prompt in page["items"]]


def prompts_of(page):
    return [next(sample["sequence_id"] for sample in prompt["samples"] if sample) for prompt in page["items"]]


# --- columns ------------------------------------------------------------


def test_evaluation_column_is_the_newest_evaluation_up_to_its_step():
    recorded = {3: [0, 50, 100]}
    assert choose_columns(recorded, [60, 100], held_out=True) == [Column(3, 60, 50, 50), Column(3, 100, 100, 100)]
    assert choose_columns(recorded, [60, 70], held_out=True) == [Column(3, 60, 50, 50), Column(3, 70)]
    assert [c.first for c in choose_columns(recorded, ["latest"], held_out=True)] == [100]


def test_training_column_is_a_range_of_steps():
    columns = choose_columns({3: range(1, 31)}, [20, 10, 50], held_out=False)
    assert columns == [Column(3, 10, 1, 10), Column(3, 20, 11, 20), Column(3, 50, 21, 30)]


def test_usual_columns_are_first_between_and_latest_of_one_run_and_the_latest_common_step_of_several():
    assert [c.step for c in choose_columns({3: list(range(0, 301, 10))}, [], held_out=True)] == [0, 100, 200, 300]
    recorded = {3: [0, 10, 20, 30], 4: [0, 15], 5: ()}
    assert choose_columns(recorded, [], held_out=True) == [Column(3, 15, 10, 10), Column(4, 15, 15, 15), Column(5, 15)]
    assert [c.last for c in choose_columns(recorded, ["latest"], held_out=True)] == [30, 15, None]
    assert choose_columns({3: ()}, [], held_out=True) == [Column(3, None)]


def test_too_many_columns_are_refused():
    recorded = {run: [0, 1, 2] for run in range(MOST_COLUMNS // 3)}
    assert len(choose_columns(recorded, [0, 1, 2], held_out=True)) == MOST_COLUMNS
    with pytest.raises(TooManyColumns):
        choose_columns({**recorded, 99: [0]}, [0, 1, 2], held_out=True)


@given(st.lists(st.integers(0, 10_000), unique=True), st.integers(2, 120))
def test_thinned_steps_are_recorded_ones_with_both_ends(steps, most):
    steps.sort()
    thinned = thin_out(steps, most)
    assert thinned == sorted(set(thinned))
    assert len(thinned) == min(most, len(steps))
    assert set(thinned) <= set(steps)
    assert thinned[:1] + thinned[-1:] == steps[:1] + steps[-1:]
    assert offered_steps({1: steps}) == thin_out(steps, 100)


@given(
    st.dictionaries(st.integers(1, 3), st.lists(st.integers(0, 40), unique=True).map(sorted), min_size=1),
    st.lists(st.integers(0, 45) | st.sampled_from(["latest", "common"]), min_size=1, max_size=4),
    st.booleans(),
)
def test_columns_of_a_run_are_disjoint_and_hold_its_newest_step_up_to_each(recorded, requested, held_out):
    columns = choose_columns(recorded, requested, held_out=held_out)
    assert list(dict.fromkeys(column.run_id for column in columns)) == list(recorded)
    for run_id, steps in recorded.items():
        after = -1
        for column in (c for c in columns if c.run_id == run_id and c.step is not None):
            within = [step for step in steps if after < step <= column.step]
            assert column.last == (within[-1] if within else None)
            assert column.first == ((within[-1] if held_out else within[0]) if within else None)
            after = column.step


def test_reward_change():
    assert reward_change([None, 0.5, None, 0.25], several_runs=False) == -0.25
    assert reward_change([0.5, 2.0, 0.25], several_runs=True) == 1.75
    assert reward_change([0.5, None], several_runs=True) is None


# --- one run --------------------------------------------------------------


def test_held_out_prompts_of_one_run_over_its_steps(compared):
    run, *_ = compared.start({step: evaluated(step, 0.1 * step, 1.0, 0.5) for step in (0, 2, 4, 6, 8)})
    page = compared.get(run).json()
    assert [(c["run"], c["step"], c["first"], c["last"]) for c in page["columns"]] == [(run.pk, s, s, s) for s in (0, 2, 6, 8)]
    assert page["steps"] == [0, 2, 4, 6, 8]
    assert steps_of(page) == [[0, 2, 6, 8]] * 3
    assert prompts_of(page) == [0, 1, 2]
    assert [prompt["change"] for prompt in page["items"]] == [pytest.approx(0.8), 0, 0]
    first = page["items"][0]["samples"][0]
    assert {key: first[key] for key in ("response", "score", "ending", "run")} == {
        "response": "step 0 of 0", "score": 0.0, "ending": "length", "run": run.pk,
    }  # fmt: skip
    assert page["runs"] == [{"id": run.pk, "name": run.name, "evaluates": True, "samples_per_step": 2}]
    assert steps_of(compared.get(run, steps="3,latest").json())[0] == [2, 8]


def test_trained_prompts_are_shown_where_they_occur_again(compared):
    trained = {step: [answer(step, prompt=f"prompt {step % 3}", score=step / 10)] for step in range(1, 9)}
    trained[8].append(answer(80, prompt="only once"))
    run, *_ = compared.start({2: evaluated(2, 1.0)}, trained)
    page = compared.get(run, steps="4,8", held_out="false", sort="prompt").json()
    assert [(c["first"], c["last"]) for c in page["columns"]] == [(1, 4), (5, 8)]
    assert steps_of(page) == [[2, 8], [3, 6], [4, 7]]
    assert compared.get(run, steps="8", held_out="false").json()["items"][-1]["samples"][0]["step"] in range(1, 9)
    assert len(compared.get(run, steps="8", held_out="false").json()["items"]) == 4, "nothing else could be beside one column"


def test_newer_attempts_responses_replace_those_of_repeated_steps(compared, events):
    run, first, worker = compared.start({step: evaluated(step, 0.1) for step in (2, 4, 6)})
    url = f"{artifact_url(run.pk)}/checkpoints/step-00000004"
    worker.attempt(first, "checkpoints", {"epoch": 1, "step": 4, "url": url, "manifest_sha256": "0", "bytes": 1})
    worker.attempt(first, "outcome", {"epoch": 1, "outcome": "engine_died", "reason": "killed"})
    compared.world.clock.advance(5)  # the back-off
    compared.world.cycle()
    second = run.attempts.get(epoch=2).pk
    worker.claim(second, 2)
    worker.send_events(second, [events.started(1, 4), events.step(2, 5, m=1.0), samples_event(3, 5, *evaluated(5, 0.9))])
    page = compared.get(run).json()
    assert steps_of(page) == [[2, 4, 5]]
    assert page["steps"] == [2, 4, 5]


# --- several runs ----------------------------------------------------------


def test_runs_are_columns_at_their_latest_common_step(compared):
    one, *_ = compared.start({0: evaluated(0, 0.1, 0.2), 4: evaluated(4, 0.3, 0.9), 8: evaluated(8, 0.5, 0.6)})
    two, *_ = compared.start({0: evaluated(0, 0.1, 0.2), 4: evaluated(4, 0.4, 0.1)})
    page = compared.get(two, one).json()
    assert [(c["run"], c["last"]) for c in page["columns"]] == [(two.pk, 4), (one.pk, 4)]
    assert prompts_of(page) == [1, 0]
    assert [prompt["change"] for prompt in page["items"]] == [pytest.approx(0.8), pytest.approx(0.1)]
    assert steps_of(compared.get(two, one, steps="latest").json()) == [[4, 8]] * 2
    assert [(c["run"], c["last"]) for c in compared.get(two, one, steps="0,latest").json()["columns"]] == [
        (two.pk, 0), (two.pk, 4), (one.pk, 0), (one.pk, 8),
    ]  # fmt: skip


def test_prompts_of_one_run_alone_have_nothing_beside_them(compared):
    one, *_ = compared.start({0: evaluated(0, 0.1, 0.2)})
    two, *_ = compared.start({0: evaluated(0, 0.1)})
    assert prompts_of(compared.get(one, two).json()) == [0]
    three, *_ = compared.start({}, evaluation=None)
    page = compared.get(three).json()
    assert (page["items"], page["steps"], page["runs"][0]["evaluates"]) == ([], [], False)
    assert page["columns"] == [{"run": three.pk, "step": None, "first": None, "last": None}]


# --- order, filter, pages, export --------------------------------------------

FILTERS = [
    {},
    {"min_score": 0.5},
    {"max_score": -0.5},
    {"min_score": -0.1, "max_score": 0.1, "ending": "eos"},
    {"min_length": 40, "max_length": 60},
    {"ending": "length"},
    {"q": '"grey sea"'},
    {"q": "HARBOUR 1", "min_score": 0},
]


def matches(sample, query):
    texts = f"{sample['prompt']}\n{sample['response']}".lower()
    words = {'"grey sea"': ["grey sea"], "HARBOUR 1": ["harbour", "1"]}.get(query.get("q"), [])
    score = sample["score"]
    return (
        (score is not None or not {"min_score", "max_score"} & query.keys())
        and (score is None or query.get("min_score", score) <= score <= query.get("max_score", score))
        and query.get("min_length", 0) <= sample["length"] <= query.get("max_length", 1000)
        and query.get("ending") in (None, sample["ending"])
        and all(word in texts for word in words)
    )


def expected(columns, query, sort, *, several):
    """What the listing holds, from lists of samples by column, newest last: (prompt, id per column) in order."""
    rows = {}
    for place, column in enumerate(columns):
        for sample in column:
            rows.setdefault(sample["prompt_key"], [None] * len(columns))[place] = sample
    kept = [row for row in rows.values() if sum(map(bool, row)) > 1 and any(s and matches(s, query) for s in row)]

    def rank(row):
        known = [s["score"] for s in row if s and s["score"] is not None]
        change = reward_change([s and s["score"] for s in row], several_runs=several)
        by = {"best": known and -max(known), "worst": known and min(known), "prompt": 0.0}
        place = by[sort] if sort in by else None if change is None else -abs(change)
        unknown = place is None or place == []
        return (
            unknown,
            0 if unknown else place,
            min(s["sequence_id"] for s in row if s),
            next(s["prompt_key"] for s in row if s),
        )

    return [[s and s["id"] for s in row] for row in sorted(kept, key=rank)]


def ids_of(page):
    return [[sample and sample["id"] for sample in prompt["samples"]] for prompt in page["items"]]


def random_evaluation(rng, step, prompts=30):
    """Scores repeat, so that ties are ordered too; some are unknown, some prompts absent, one is answered twice."""
    samples = []
    for n in [*range(prompts), 3]:
        facts = {"score": rng.choice([None, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0]), "length": rng.randrange(100)}
        words = rng.choice(["the grey sea", "a harbour", "grey is the sea"])
        made = answer(n, prompt=f"write {n % 7} of {n}", response=f"{words} {step}", held_out=True, **facts)
        samples += [made] if rng.random() < 0.8 else []
    return samples


@pytest.fixture(params=[False, True], ids=["one run", "several runs"])
def many(request, compared):
    """(get, columns): samples at random, and as the samples' own listing has them by column."""
    rng, several = random.Random(7), request.param
    steps = (0, 2) if several else (0, 2, 4)
    runs = [compared.start({}) for _ in range(3 if several else 1)]
    for _, attempt_id, _ in runs:
        for step in steps:
            for sample in random_evaluation(rng, step):
                SampleRow.objects.create(attempt_id=attempt_id, step=step, data=sample)
    client = compared.world.login("vic")

    def listed(run, step):
        url = f"/api/v1/runs/{run.pk}/samples"
        return client.get(url, {"step": step, "held_out": "true", "sort": "step", "limit": 200}).json()["items"]

    columns = [listed(run, step) for run, *_ in runs for step in ([2] if several else steps)]
    return lambda **query: compared.get(*(run for run, *_ in runs), **query), columns, several


def test_listing_is_that_of_the_oracle_in_every_order_and_filter_on_any_pages(many):
    get, columns, several = many
    some = 0
    for sort, query in itertools.product(["change", "best", "worst", "prompt"], FILTERS):
        whole = ids_of(get(sort=sort, limit=200, **query).json())
        assert whole == expected(columns, query, sort, several=several), (sort, query)
        paged, cursor = [], ""
        while cursor is not None:
            page = get(sort=sort, limit=7, cursor=cursor, **query).json()
            paged += ids_of(page)
            cursor = page["next"]
        assert paged == whole, (sort, query)
        some += 0 < len(whole) < 20
    assert some > 8, "filters should leave some prompts and not all"


def test_export_is_the_listing_line_by_line(many, monkeypatch):
    monkeypatch.setattr(sample_comparison, "PROMPTS_A_READ", 4)
    get, *_ = many
    for query in FILTERS:
        listed = get(sort="worst", limit=200, **query).json()["items"]
        reply = get(path="compare/samples.ndjson", sort="worst", **query)
        assert (reply.status_code, reply.headers["Content-Type"]) == (200, "application/x-ndjson")
        with pytest.warns(Warning, match="consume asynchronous"):  # a test's client has no event loop
            lines = [json.loads(line) for line in b"".join(reply).splitlines()]
        wanted = [
            {"column": place, **sample}
            for prompt in listed
            for place, sample in enumerate(prompt["samples"])
            if sample is not None
        ]
        assert lines == wanted, query


def test_one_prompt_alone_and_excerpts(compared):
    run, *_ = compared.start({step: evaluated(step, 0.1, 0.2, messages=None) for step in (0, 2)})
    key = compared.get(run, sort="prompt").json()["items"][1]["prompt_key"]
    page = compared.get(run, prompt=key, excerpt=4).json()
    assert prompts_of(page) == [1]
    assert page["items"][0]["samples"][1]["response"] == "step …"
    assert "messages" not in page["items"][0]["samples"][1]


# --- refusals and access --------------------------------------------------------


def test_invalid_parameters_are_422(compared):
    run, *_ = compared.start({0: evaluated(0, 0.1)})
    bad = [
        {"steps": "x"},
        {"steps": "1,"},
        {"steps": "-1"},
        {"sort": "score"},
        {"min_score": "nan"},
        {"min_length": -1},
        {"limit": 0},
    ]
    bad += [{"cursor": cursor} for cursor in ("x", "W10", "WyJhIiwgMV0")] + [{"prompt": "x"}, {"ending": "x"}, {"step": 3}]
    bad += [{"steps": ",".join(map(str, range(MOST_COLUMNS + 1)))}]
    for query in bad:
        assert compared.get(run, **query).status_code == 422, query
        if "limit" not in query and "cursor" not in query:
            assert compared.get(run, path="compare/samples.ndjson", **query).status_code == 422, query
    assert compared.get().status_code == 422
    assert "fewer runs" in compared.get(run, **bad[-1]).json()["detail"]


def test_another_teams_runs_do_not_exist(compared):
    run, *_ = compared.start({0: evaluated(0, 0.1)})
    eve = compared.world.login("eve")
    for path in ("compare/samples", "compare/samples.ndjson"):
        assert eve.get(f"/api/v1/{path}", {"runs": run.pk}).status_code == 404
        assert compared.get(run, path=path).status_code == 200
        assert compared.world.login("vic").get(f"/api/v1/{path}", {"runs": f"{run.pk},{run.pk + 1000}"}).status_code == 404

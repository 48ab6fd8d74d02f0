"""The runs table: a filter finds what looking at each run finds, and pages hold every run once, however they are sorted."""

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oppo_platform.cursors import write_cursor
from oppo_platform.runs.filtering import NUMBERS, FilterError
from oppo_platform.runs.labels import MOST_TAGS, change_tags
from oppo_platform.runs.models import Run
from oppo_platform.runs.selectors import list_runs

NAMES = ("alpha baseline", "beta", "Gamma one", "delta")
REWARDS = (None, -1.0, 0.5, 1.2, 1.2, 3.0)


@pytest.fixture
def fleet(world):
    """Two dozen runs of ada and ben, in several states, with and without figures."""
    for number in range(24):
        reward = REWARDS[number % len(REWARDS)]
        run = world.submit(["ada", "ben"][number % 2], name=NAMES[number % len(NAMES)], ppo={"batch_size": [8, 16][number % 2]})
        run.latest = {"critic/score/mean": reward, "actor/entropy": number / 10} if number % 6 else {}
        run.state, run.step = ["queued", "running", "succeeded", "failed"][number // 6], number
        run.tags = ["baseline"] if number % 5 == 0 else ["x", "y"] if number % 5 == 1 else []
        run.created_at -= timedelta(hours=number)
        run.bubble = number / 24
        run.save()
    return world


def found(world, where, user="ada", **more):
    return {item["id"] for item in list_runs(world.people[user], where=where, limit=200, **more)["items"]}


def value_of(run, name):
    return {"reward": run.reward, "step": run.step, "actor/entropy": run.latest.get("actor/entropy"), "bubble": run.bubble,
            "ppo.batch_size": run.spec["ppo"]["batch_size"], "priority": run.priority}[name]  # fmt: skip


COMPARE = {">": lambda a, b: a > b, ">=": lambda a, b: a >= b, "<": lambda a, b: a < b, "<=": lambda a, b: a <= b,
           "=": lambda a, b: a == b, "!=": lambda a, b: a != b}  # fmt: skip
TEXT_TERMS = {
    "state:running": lambda run: run.state == "running",
    "state:queued,failed": lambda run: run.state in ("queued", "failed"),
    "state:ended": lambda run: run.state in ("succeeded", "failed", "cancelled"),
    "user:ADA": lambda run: run.user.username == "ada",
    "tag:baseline": lambda run: "baseline" in run.tags,
    "tag:baseline,x": lambda run: bool({"baseline", "x"} & set(run.tags)),
    'name:"gamma one"': lambda run: run.name == "Gamma one",
    "beta": lambda run: "beta" in run.name,
    "baseline": lambda run: "baseline" in run.name or "baseline" in run.tags,
    "models.reward.rule=letters:score": lambda run: True,
    "models.reward.rule!=letters:score": lambda run: False,
}
NUMBER_TERMS = st.tuples(
    st.sampled_from(["reward", "step", "actor/entropy", "bubble", "ppo.batch_size", "priority"]), st.sampled_from(list(COMPARE)),
    st.sampled_from([-1.0, 0.5, 0.7, 1.2, 8, 16, 20, 50]),
)  # fmt: skip
TERMS = st.lists(st.tuples(st.booleans(), st.one_of(st.sampled_from(list(TEXT_TERMS)), NUMBER_TERMS)), max_size=3)


def holds(run, term):
    if isinstance(term, str):
        return TEXT_TERMS[term](run)
    name, op, wanted = term
    value = value_of(run, name)
    return value is not None and COMPARE[op](value, wanted)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(terms=TERMS)
def test_a_filter_finds_what_looking_at_each_run_finds(fleet, terms):
    text = " ".join(("-" if negated else "") + (t if isinstance(t, str) else f"{t[0]}{t[1]}{t[2]}") for negated, t in terms)
    runs = Run.objects.select_related("user")
    wanted = {run.pk for run in runs if all(holds(run, term) != negated for negated, term in terms)}
    assert found(fleet, text) == wanted


@pytest.mark.parametrize(
    "sort", ["", "reward", "-reward", "-kl", "name", "-submitted", "-step", "actor/entropy", "ppo.batch_size"]
)
def test_pages_hold_every_run_once_and_in_order(fleet, sort):
    pages, cursor = [], ""
    while True:
        page = list_runs(fleet.people["ada"], sort=sort, limit=5, cursor=cursor)
        pages += page["items"]
        cursor = page["next"]
        if cursor is None:
            break
    assert len(pages) == len({item["id"] for item in pages}) == 24
    if sort.endswith("reward"):
        figures = [item["latest"].get("critic/score/mean") for item in pages]
        known = [figure for figure in figures if figure is not None]
        assert figures == sorted(known, reverse=sort.startswith("-")) + [None] * (24 - len(known))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("stat:running", "Did you mean “state”?"),
        ("stat:running rewrd>1", "Did you mean “reward”?"),
        ("state:runing", "Did you mean “running”?"),
        ("state:", "“state:” needs a value"),
        ("reward>high", "“high” is not a number"),
        ("age<soon", "not a time such as"),
        ("rewrd>1", "Did you mean “reward”?"),
        ("x" * 1001, "at most 1000"),
        (" a" * 31, "at most 30"),
        ("a\0b", "at most"),
    ],
)
def test_a_filter_that_makes_no_sense_says_what_would(fleet, where, message):
    with pytest.raises(FilterError) as error:
        found(fleet, where)
    assert message in error.value.message
    reply = fleet.login("ada").get("/api/v1/runs", {"filter": where})
    assert reply.status_code == 422
    assert message in reply.json()["detail"]
    assert message in fleet.login("ada").get("/runs", {"q": where, "part": "rows"}).content.decode()
    assert message in fleet.login("ada").get("/runs", {"q": where}).content.decode()


@pytest.mark.parametrize(
    "where",
    [
        '"',
        "-",
        "--a",
        "a:b:c",
        "(",
        "%",
        "\\",
        "'; drop table runs_run; --",
        "bubble/cpu:0>0.5",
        "reward=nan",
        "reward<inf",
        ":",
        "=1",
    ],
)
def test_odd_filters_break_nothing(fleet, where):
    assert fleet.login("ada").get("/api/v1/runs", {"filter": where}).status_code in (200, 422)


@pytest.mark.parametrize(
    "cursor",
    ["x", "-1", "9" * 30, "\0", write_cursor(3), write_cursor(3, "abc"), write_cursor("3", 1.0), write_cursor(2**70, 1.0)],
)
def test_odd_places_are_refused(fleet, cursor):
    reply = fleet.login("ada").get("/api/v1/runs", {"sort": "-reward", "cursor": cursor})
    assert reply.status_code == 422


def test_runs_are_not_sorted_by_what_changes_between_two_pages(fleet):
    reply = fleet.login("ada").get("/api/v1/runs", {"sort": "-age"})
    assert (reply.status_code, "“submitted”" in reply.json()["detail"]) == (422, True)
    newest = list_runs(fleet.people["ada"], sort="-submitted")["items"][0]
    assert newest["id"] == Run.objects.order_by("-created_at").first().pk


def test_age_and_times_are_written_as_people_do(fleet):
    assert len(found(fleet, "age<150m")) == 3
    assert len(found(fleet, "age>=1d")) == 0
    assert len(found(fleet, "elapsed<1h")) == 24


def test_filters_never_match_runs_of_other_teams(fleet):
    assert found(fleet, "", "eve") == set()
    told = fleet.login("eve").get("/api/v1/runs/words").json()
    assert (told["values"]["user"], told["values"]["tag"], told["metrics"]) == ([], [], [])


def test_a_run_is_found_by_its_number(fleet):
    run = Run.objects.order_by("id")[3]
    assert found(fleet, f"#{run.pk}") == {run.pk}
    assert found(fleet, f"-#{run.pk}") == {other.pk for other in Run.objects.all()} - {run.pk}
    assert found(fleet, f"id={run.pk}") == {run.pk}
    assert found(fleet, "#0") == found(fleet, "#" + "9" * 30) == set()


def test_words_for_completion(fleet):
    told = fleet.login("vic").get("/api/v1/runs/words").json()
    assert {field["name"] for field in told["fields"]} >= set(NUMBERS)
    assert told["values"]["tag"] == ["baseline", "x", "y"]
    assert told["values"]["user"] == ["ada", "ben"]
    assert told["metrics"] == ["actor/entropy", "critic/score/mean"]


def test_tags_by_http(fleet):
    run = Run.objects.order_by("pk")[1]
    url = f"/api/v1/runs/{run.pk}/tags"
    body = {"add": ["new", "x"], "remove": ["y", "none"]}
    reply = fleet.login("ben").post(url, body, content_type="application/json")
    assert reply.json()["tags"] == ["x", "new"]
    assert reply.json()["cursor"] == run.cursor + 1
    assert fleet.login("vic").post(url, body, content_type="application/json").status_code == 403
    assert fleet.login("eve").post(url, body, content_type="application/json").status_code == 404
    for wrong in ("", "a b", "a,b", "x" * 41, 'a"'):
        assert fleet.login("ada").post(url, {"add": [wrong]}, content_type="application/json").status_code == 422
    many = {"add": [f"t{n}" for n in range(MOST_TAGS)]}
    assert "at most 20" in fleet.login("ada").post(url, many, content_type="application/json").json()["detail"]
    run.refresh_from_db()
    assert run.tags == ["x", "new"]


def test_two_people_who_tag_at_once_lose_nothing(fleet, at_once):
    run = Run.objects.order_by("pk").last()
    tags = [f"t{n}" for n in range(6)]
    assert len(at_once(*(lambda t=t: change_tags(run.pk, [t], [], "user:ada") for t in tags))) == 6
    run.refresh_from_db()
    assert set(run.tags) >= set(tags)


def test_the_columns_of_the_table_follow_the_run(world, events):
    worker = world.worker(devices=2, kind="cuda")
    _, attempt_id = world.start(worker)
    told = {"critic/score/mean": 1.25, "objective/kl": 0.5, "bubble/cuda:0": 0.2, "bubble/cuda:1": 0.4}
    worker.send_events(attempt_id, [events.step(1, 1, **told)])
    run = Run.objects.get()
    assert (run.reward, run.kl, round(run.bubble, 9)) == (1.25, 0.5, 0.3)
    worker.send_events(attempt_id, [events.step(2, 2, **{**told, "critic/score/mean": "NaN", "bubble/cuda:0": "NaN"})])
    run.refresh_from_db()
    assert (run.reward, run.bubble) == (None, 0.4)

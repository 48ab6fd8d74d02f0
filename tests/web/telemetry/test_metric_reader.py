"""Reading series: attempts merge, axes join, runs are compared."""

import pytest

from oppo_platform.accounts.models import User
from oppo_platform.pages.page_context import with_curves
from oppo_platform.runs.models import Run
from oppo_platform.runs.selectors import get_runs, list_runs
from oppo_platform.telemetry.comparison import CompareOptions, compare
from oppo_platform.telemetry.models import SpanBatch
from oppo_platform.telemetry.timelines import timeline
from tests.web.event_factories import series_points


@pytest.fixture
def resumed(world, events):
    """A run that died at step 6 and was resumed from its checkpoint at step 4, up to step 8."""
    worker = world.worker()
    run, first = world.start(worker)
    batch = [events.started(1, time=1000.0)] + [events.step(i + 1, i, m=float(i), old=1.0) for i in range(1, 7)]
    worker.send_events(first, batch)
    url = f"{run_root(run)}/checkpoints/step-00000004"
    worker.attempt(first, "checkpoints", {"epoch": 1, "step": 4, "url": url, "manifest_sha256": "0", "bytes": 1})
    worker.attempt(first, "outcome", {"epoch": 1, "outcome": "engine_died", "reason": "killed"})
    world.clock.advance(5)  # the back-off
    world.cycle()
    second = run.attempts.get(epoch=2).pk
    worker.claim(second, 2)
    return worker, run, first, second


def run_root(run):
    from oppo_platform.runs.attempts import artifact_url

    return artifact_url(run.pk)


def test_the_newer_attempt_wins_from_its_first_step_on(resumed, events):
    worker, run, first, second = resumed
    run.refresh_from_db()
    # Before it has told anything, what the older one told stays.
    assert list(series_points(run, "m")) == [1, 2, 3, 4, 5, 6]
    worker.send_events(second, [events.started(1, 4, time=2000.0), events.step(2, 5, m=50.0), events.step(3, 6, m=60.0)])
    assert series_points(run, "m") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 50.0, 6: 60.0}
    assert series_points(run, "old") == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
    # Late history of the fenced attempt does not come back.
    worker.send_events(first, [events.step(8, 7, m=7.0)])
    assert max(series_points(run, "m")) == 6
    assert Run.objects.get().latest["m"] == 60.0


def test_sparkline_uses_the_newest_attempt(resumed, events):
    worker, _, first, second = resumed
    user = User.objects.get(username="vic")

    def shown():
        [summary] = with_curves(list_runs(user)["items"])
        return summary["step"], summary["attempt"], list(summary["curve"])

    worker.send_events(first, [events.step(8, 6, **{"critic/score/mean": 0.1})])
    assert shown() == (6, 1, [0.1])
    told = [events.step(2, 5, **{"critic/score/mean": 0.5}), events.step(3, 6, **{"critic/score/mean": 0.6})]
    worker.send_events(second, [events.started(1, 4, time=2000.0), *told])
    assert shown() == (6, 2, [0.5, 0.6])
    retold = events.step(4, 6, **{"critic/score/mean": 0.7}) | {"elapsed_s": 6.5}
    worker.send_events(second, [retold])
    assert shown() == (6, 2, [0.5, 0.7]), "in an older version the same attempt could tell a step again"


def spans_event(seq, step, start):
    columns = {"device": ["cpu:0"], "role": ["actor"], "phase": ["decode"], "start_s": [start], "end_s": [start + 1]}
    idle = [["cpu:1", "tail", start, start + 1]]
    more = {"window_s": [start, start + 1.0], "chunk": [1], "rows": [2], "idle": idle, "deferred": []}
    more |= {"flows": [], "counters": {"live_rows": [[start, 2.0], [start + 1, 0.0]]}, "trained": []}
    return {"kind": "spans", "producer": "engine", "seq": seq, "time": 1.0, "step": step, **columns, **more}


def test_timelines_of_attempts_share_one_axis(resumed, events):
    worker, run, first, second = resumed
    worker.send_events(first, [spans_event(8, 3, 10.0)])
    worker.send_events(second, [events.started(1, 4, time=1500.0), events.step(2, 5, m=1.0), spans_event(3, 5, 10.0)])
    told = timeline(run)
    assert (told["first_step"], told["last_step"], told["devices"]) == (3, 5, ["cpu:0", "cpu:1"])
    assert [step["start_s"] for step in told["steps"]] == [[10.0], [510.0]]
    assert told["steps"][1]["idle"] == [["cpu:1", "tail", 510.0, 511.0]]
    assert told["steps"][1]["counters"] == {"live_rows": [[510.0, 2.0], [511.0, 0.0]]}
    assert told["steps"][0].keys() == spans_event(1, 3, 10.0).keys() - {"kind", "producer", "seq", "time"}
    assert [step["step"] for step in timeline(run, from_step=4)["steps"]] == [5]
    assert timeline(run, to_step=2)["steps"] == []


def test_a_timeline_names_the_devices_that_only_an_earlier_attempt_was_on(resumed, events):
    worker, run, first, second = resumed
    worker.send_events(first, [spans_event(8, 3, 10.0)])
    moved = events.started(1, 4, time=1500.0) | {"devices": ["cuda:3"], "lanes": [["cuda:3", "actor"]]}
    elsewhere = spans_event(3, 5, 10.0) | {"device": ["cuda:3"], "idle": []}
    worker.send_events(second, [moved, events.step(2, 5, m=1.0), elsewhere])
    assert timeline(run)["devices"] == ["cuda:3", "cpu:0", "cpu:1"]
    assert timeline(run, from_step=5)["devices"] == ["cuda:3"]


def test_a_timeline_that_was_stored_before_counters_came_is_shown(resumed, events):
    worker, run, _, second = resumed
    worker.send_events(second, [events.started(1, 4, time=1500.0), events.step(2, 5, m=1.0), spans_event(3, 5, 10.0)])
    stored = SpanBatch.objects.get()
    stored.data = {key: value for key, value in stored.data.items() if key not in ("flows", "counters", "trained")}
    stored.save()
    (step,) = timeline(run)["steps"]
    assert (step["start_s"], step["counters"]) == ([510.0], {})


def test_axes_and_increments_over_http(world, events):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    told = [events.step(i, i, **{"bubble/cpu:0": i / 10, "bubble/cpu:1": 0.5, "m": 1.0}) for i in range(1, 5)]
    worker.send_events(attempt_id, told)
    client = world.login("ada")

    def get(**query):
        return client.get(f"/api/v1/runs/{run.pk}/metrics", query).json()

    told = get(keys="bubble/*", x="tokens")
    assert (told["x"], told["last_step"], sorted(told["series"])) == ("tokens", 4, ["bubble/cpu:0", "bubble/cpu:1"])
    assert told["series"]["bubble/cpu:0"] == {"step": [1, 2, 3, 4], "x": [100, 200, 300, 400], "y": [0.1, 0.2, 0.3, 0.4]}
    assert get(keys="m", since_step=3)["series"]["m"] == {"step": [4], "x": [4.0], "y": [1.0]}
    assert get(keys="m,none", x="wall")["series"]["none"] == {"step": [], "x": [], "y": []}
    assert client.get(f"/api/v1/runs/{run.pk}/metrics", {"keys": "m", "x": "moon"}).status_code == 422


def test_comparison(world, events):
    worker = world.worker(devices=2, kind="cuda")
    slow, first = world.start(worker, overlap={"intra_step": "off", "inter_step": "off"}, budget={"target_reward": 1.0})
    fast, second = world.start(worker)
    for attempt_id, pace in ((first, 2.0), (second, 1.0)):
        metrics = {"timing_s/step": pace, "bubble/cpu:0": pace / 10, "oppo/deferred_token_share": 0.25, f"custom/{pace}": pace}
        batch = [events.step(i, i, **{"critic/score/mean": 0.5 if i < 3 else 9.0}, **metrics) for i in range(1, 21)]
        worker.send_events(attempt_id, [{**event, "elapsed_s": event["step"] * pace} for event in batch])
    client = world.login("vic")
    told = client.get("/api/v1/compare", {"runs": f"{slow.pk},{fast.pk}", "keys": "critic/score/mean"}).json()
    assert told["target"] == 1.0
    known = {*metrics, "custom/2.0", "critic/score/mean"}
    assert (known & set(told["metrics"]), sorted(told["metrics"])) == (known, told["metrics"]), "of both runs"
    assert not any("latest" in run for run in told["runs"])
    # 0.5, 0.5, then 0.1·9 + 0.9·0.5 = 1.35 at step 3.
    assert told["time_to_target"] == {str(slow.pk): {"step": 3, "elapsed_s": 6.0}, str(fast.pk): {"step": 3, "elapsed_s": 3.0}}
    assert told["speedup"] == {str(slow.pk): 1.0, str(fast.pk): 2.0}
    figures = told["figures"][str(fast.pk)]
    assert figures == {
        "step_s": 1.0,
        "bubble": 0.1,
        "occupancy": None,
        "reward_last_tenth": 9.0,
        "wall_s": 20.0,
        "deferred_share": 0.25,
    }
    paths = {line["path"]: line["values"][str(slow.pk)] for line in told["config_diff"]}
    assert paths == {"overlap.intra_step": "off", "overlap.inter_step": "off", "budget.target_reward": "1.0"}
    assert len(told["series"][str(slow.pk)]["critic/score/mean"]["y"]) == 20
    without = compare(get_runs(world.people["vic"], [slow.pk, fast.pk]), [], "step", view=CompareOptions(target=99.0))
    assert set(without["speedup"].values()) == {None}


def test_a_setting_is_shown_as_one_would_enter_it(world):
    ids = [world.submit("ada", ppo={"learning_rate": rate}).pk for rate in (10 * 5e-7, 3e-4)]
    told = compare(get_runs(world.people["ada"], ids), [], "step", view=CompareOptions())
    assert 10 * 5e-7 != 5e-6, "it was computed"
    assert [line["values"] for line in told["config_diff"]] == [{str(ids[0]): "5e-06", str(ids[1]): "0.0003"}]


def test_runs_of_one_setting_are_one_group(world, events):
    worker = world.worker(devices=5, kind="cuda")
    paces = {("off", 1): 2.0, ("off", 2): 4.0, ("per_chunk", 1): 1.0, ("per_chunk", 2): 2.0, ("per_chunk", 3): None}
    ids = []
    for (intra, seed), pace in paces.items():
        run, attempt = world.start(worker, seed=seed, overlap={"intra_step": intra, "inter_step": "off"})
        scores = {i: 0.5 if i < 3 or pace is None else 9.0 for i in range(1, 6)}
        batch = [{**events.step(i, i, **{"critic/score/mean": y}), "elapsed_s": i * (pace or 1.0)} for i, y in scores.items()]
        worker.send_events(attempt, batch)
        ids.append(run.pk)
    client = world.login("vic")
    asked = {"runs": ",".join(map(str, ids)), "target": 1.0, "baseline": ids[1]}
    told = client.get("/api/v1/compare", {**asked, "group": "overlap.intra_step"}).json()
    off, chunked = told["groups"]
    assert (off["value"], off["runs"], off["reached"], off["elapsed_s"]) == ("off", ids[:2], 2, 9.0)
    assert (chunked["value"], chunked["runs"], chunked["reached"], chunked["step"]) == ("per_chunk", ids[2:], 2, 3.0)
    assert (off["speedup"]["mean"], chunked["speedup"]["mean"]) == (1.0, 2.0)
    assert 1.0 <= chunked["speedup"]["low"] < 2.0 < chunked["speedup"]["high"] <= 4.0
    assert told["speedup"][str(ids[2])] == 3.0, "a run against the mean of the baseline's group"
    assert told["speedup"][str(ids[4])] is None
    but_seed = client.get("/api/v1/compare", {**asked, "group": "-seed"}).json()["groups"]
    assert [(group["value"], len(group["runs"])) for group in but_seed] == [("off", 2), ("per_chunk", 3)]
    alone = client.get("/api/v1/compare", asked).json()
    assert (alone["groups"], alone["baseline"], alone["speedup"][str(ids[0])]) == ([], ids[1], 2.0)
    assert client.get("/api/v1/compare", {**asked, "baseline": ids[4] + 1}).status_code == 422

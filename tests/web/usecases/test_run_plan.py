"""The plan of a run: computed at the check, stored at submission, and compared with what happened; it blocks nothing."""

import itertools

import pytest
from django.db import connection

from oppo_contract.spec import load_spec
from oppo_platform.runs.models import Run
from oppo_platform.runs.preflight import NodeOffer
from oppo_platform.scheduling.models import Reservation, WaitingReason
from oppo_platform.usecases import run_plan
from oppo_platform.usecases.check_spec import ClusterView
from oppo_platform.usecases.earlier_runs import earlier_runs
from oppo_platform.usecases.plan_review import compare_plan, plan_review
from tests.web.event_factories import end, register

GIB = 2**30
SIZES = {"weights": 124_000_000, "layers": 12, "width": 768, "cached": 18_432, "vocab": 50_257, "context": 1024}


@pytest.fixture
def report(world, make_entry, base_catalogue):
    """A node with these devices and models."""

    def make(name="node1", *, memory=16 * GIB, kind="cpu", model="EPYC", count=1, extra=()):
        worker = world.worker(name, catalogue=[*base_catalogue, make_entry("gpt2", task="causal_lm", **SIZES), *extra])
        devices = [{"index": i, "kind": kind, "model": model, "memory_bytes": memory} for i in range(count)]
        body = {"devices": devices, "attempts": [], "catalogue": None}
        assert worker.post("heartbeat", body, worker.token).status_code == 200
        return worker

    return make


def actor(name="gpt2"):
    return {"actor": {"path": name}, "reward": {"rule": "letters:score"}}


def validate(client, spec):
    reply = client.post("/api/v1/runs/validate", {"spec": spec}, content_type="application/json").json()
    assert reply["ok"], reply["problems"]
    return reply["plan"]


def trained(world, worker, events, steps=6, step_s=2.0, tokens=800, peak_gb=15.0, saved_at=None, **changes):
    """A run of the team that has ended: (run, attempt id). `saved_at`: step of its checkpoint."""
    run, attempt_id = world.start(worker, **changes)
    metrics = {"timing_s/gen": 0.5 * step_s, "prompt_length/mean": 10.0, "perf/max_rss_gb": peak_gb}
    reports = [
        events.step(1 + n, n, **metrics) | {"elapsed_s": step_s * n, "generated_tokens": tokens * n, "device_seconds": step_s * n}
        for n in range(1, steps + 1)
    ]
    assert worker.send_events(attempt_id, [events.started(1), *reports]).status_code == 200
    if saved_at is not None:
        register(worker, run, attempt_id, saved_at, write=False)
    end(worker, attempt_id)
    run.refresh_from_db()
    return run, attempt_id


def test_memory_is_split_by_role_and_compared_with_the_device(world, report, make_spec):
    report(memory=16 * GIB)
    memory = validate(world.login("ada"), make_spec(models=actor()))["memory"]
    (device,) = memory["devices"]
    assert device["roles"] == ["actor", "reference", "critic"]
    assert device["needed_bytes"] == sum(term["bytes"] for term in device["terms"])
    uses = {(term["role"], term["use"]): term["bytes"] for term in device["terms"]}
    assert uses["actor", "weights"] == uses["reference", "weights"] == 4 * SIZES["weights"]
    assert uses["actor", "optimizer"] == 8 * SIZES["weights"]
    assert ("processes", "libraries") in uses
    assert device["available_bytes"] == 16 * GIB
    assert device["fits"] == (device["needed_bytes"] <= 16 * GIB)


def test_what_does_not_fit_has_a_remedy_that_fits(world, report, make_spec):
    report(memory=12 * GIB)
    client, spec = world.login("ada"), make_spec(models=actor(), rollout={"max_new_tokens": 512, "max_prompt_tokens": 256})
    plan = validate(client, spec)
    assert not plan["memory"]["devices"][0]["fits"]
    remedy = plan["memory"]["remedy"]
    assert set(remedy) == {"ppo.micro_batch_tokens"}
    tokens = remedy["ppo.micro_batch_tokens"]
    changed = validate(client, spec | {"ppo": {"micro_batch_tokens": tokens}})
    assert changed["memory"]["devices"][0]["fits"]
    assert changed["memory"]["remedy"] is None


def test_an_older_worker_does_not_report_shapes_and_the_plan_gives_that_reason(world, report, make_spec, make_entry):
    report(extra=[make_entry("old", task="causal_lm", weights=1000)])
    plan = validate(world.login("ada"), make_spec(models=actor("old")))
    assert plan["memory"]["unknown"] == "the worker does not report the shape of old"
    assert plan["time"]["unknown"] == plan["memory"]["unknown"]
    assert plan["saving"] is None
    assert plan["start"]["at"] == plan["planned_at"], "the start does not depend on it"


def test_time_is_simulated_until_a_run_has_measured_it(world, report, make_spec, events):
    worker = report()
    client, spec = world.login("ada"), make_spec(models=actor(), steps=50)
    before = validate(client, spec)
    assert (before["time"]["basis"], before["time"]["runs"]) == ("simulated", [])
    assert before["time"]["text"].startswith("simulated with the speed of a typical CPU core")
    assert "no earlier run of this actor on this device" in before["time"]["text"]
    run, _ = trained(world, worker, events, models=actor(), step_s=2.0)
    after = validate(client, spec)
    assert (after["time"]["basis"], after["time"]["runs"]) == ("earlier_runs", [run.pk])
    assert after["time"]["text"] == "from 1 earlier run of this actor on this device"
    assert after["time"]["step_s"] == pytest.approx(2.0)
    assert after["time"]["duration_s"] == pytest.approx(100.0)
    assert after["time"]["device_hours"] == pytest.approx(100 / 3600)
    assert after["memory"]["expected_bytes"] == pytest.approx(15e9)


def test_a_simulated_time_of_a_gpu_names_the_data_sheet(world, report, make_spec):
    report(kind="cuda", model="NVIDIA H100 80GB HBM3", memory=80 * GIB)
    text = validate(world.login("ada"), make_spec(models=actor()))["time"]["text"]
    assert text.startswith("simulated with the rates of the device's data sheet")


def test_a_time_limit_bounds_the_duration(world, report, make_spec, events):
    worker = report()
    trained(world, worker, events, models=actor(), step_s=2.0)
    plan = validate(world.login("ada"), make_spec(models=actor(), steps=5000, budget={"max_hours": 1}))
    assert plan["time"]["duration_s"] == 3600


def test_runs_of_other_teams_are_neither_used_nor_named(world, report, make_spec, events):
    worker = report()
    run, _ = trained(world, worker, events, models=actor())
    assert validate(world.login("ada"), make_spec(models=actor()))["time"]["runs"] == [run.pk]
    assert validate(world.login("eve"), make_spec(models=actor()))["time"]["runs"] == []
    viewer = validate(world.login("vic"), make_spec(models=actor()))
    assert viewer["time"]["basis"] == "simulated"
    assert viewer["start"]["unknown"] == "only members who may submit to the project see the start"


def test_only_runs_of_the_actor_on_the_kind_of_device_count(world, report, make_spec, events):
    worker = report()
    spec = load_spec(make_spec(models=actor()))
    run, _ = trained(world, worker, events, models=actor())
    trained(world, worker, events)  # another actor
    trained(world, worker, events, steps=2, models=actor())  # too short
    found = lambda model="EPYC": [r.run_id for r in earlier_runs(world.team.pk, spec, "cpu", model)]  # noqa: E731
    assert found() == [run.pk]
    assert found("Xeon") == []
    Run.objects.filter(pk=run.pk).update(deleted_at=world.clock.now())
    assert found() == [], "it is in the trash"


def test_runs_with_the_same_overlap_count_before_others(world, report, make_spec, events):
    worker = report()
    off = {"intra_step": "off", "inter_step": "off"}
    sequential, _ = trained(world, worker, events, models=actor(), overlap=off)
    spec = load_spec(make_spec(models=actor()))
    found = lambda of: [r.run_id for r in earlier_runs(world.team.pk, of, "cpu", "EPYC")]  # noqa: E731
    assert found(spec) == [sequential.pk], "better than none"
    oppo, _ = trained(world, worker, events, models=actor())
    assert found(spec) == [oppo.pk]
    assert found(load_spec(make_spec(models=actor(), overlap=off))) == [sequential.pk]


def test_the_saving_is_absent_without_overlap(world, report, make_spec):
    report()
    client = world.login("ada")
    saving = validate(client, make_spec(models=actor()))["saving"]
    assert saving["basis"] == "simulated"
    assert -1 < saving["share"] < 1
    assert validate(client, make_spec(models=actor(), overlap={"intra_step": "off", "inter_step": "off"}))["saving"] is None


def test_the_start_is_what_the_scheduler_would_predict_and_nothing_is_written(world, report, make_spec, events):
    worker = report()
    client = world.login("ada")
    assert validate(client, make_spec())["start"] == {
        "at": "2026-11-01T12:00:00Z", "text": "Its devices are free.", "sooner": "", "unknown": "",
    }  # fmt: skip
    _, attempt_id = world.start(worker)
    world.clock.advance(10)
    assert worker.send_events(attempt_id, [events.started(1), events.step(2, 10)]).status_code == 200
    start = validate(client, make_spec())["start"]
    assert start["at"] == "2026-11-01T12:01:40Z", "90 steps of one second are left"
    assert start["text"].startswith("Waits for 1 device")
    assert (Run.objects.count(), WaitingReason.objects.count(), Reservation.objects.count()) == (1, 0, 0)


def test_the_start_names_no_runs_of_other_teams(world, report, make_spec):
    worker = report()
    world.start(worker, name="unreleased model")
    start = validate(world.login("eve"), make_spec())["start"]
    assert start["text"], "she has to wait"
    secrets = ("unreleased", "ada", world.team.name)
    assert not [word for word in secrets if word in start["text"] + start["sooner"]]


def test_an_invalid_spec_has_no_plan(world, report, make_spec):
    report()
    reply = world.login("ada").post("/api/v1/runs/validate", {"spec": make_spec(steps=0)}, content_type="application/json").json()
    assert (reply["ok"], reply["plan"]) == (False, None)


@pytest.mark.parametrize("broken", ["estimate_step", "plan_memory", "earlier_runs", "plan_start"])
def test_a_failing_estimate_blocks_no_submission(world, report, make_spec, monkeypatch, broken):
    report()

    def fail(*arguments):
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1/0")

    monkeypatch.setattr(run_plan, broken, fail)
    body, headers = {"spec": make_spec(models=actor())}, {"Idempotency-Key": broken}  # with a key the request is a transaction
    reply = world.login("ada").post("/api/v1/runs", body, content_type="application/json", headers=headers)
    assert reply.status_code == 201, reply.content
    plan = Run.objects.get().plan
    unknown = {"plan_memory": plan["memory"], "plan_start": plan["start"], "estimate_step": plan["time"]}
    if broken in unknown:
        assert unknown[broken]["unknown"] == run_plan.FAILED


def test_a_run_keeps_its_plan_and_shows_what_happened(world, report, make_spec, events):
    worker = report()
    trained(world, worker, events, models=actor(), step_s=2.0)
    client = world.login("ada")
    spec = make_spec(models=actor(), steps=6)
    run = Run.objects.get(pk=client.post("/api/v1/runs", {"spec": spec}, content_type="application/json").json()["id"])
    world.cycle()
    attempt = run.attempts.get()
    worker.claim(attempt.pk)
    world.clock.advance(30)
    worker.attempt(attempt.pk, "heartbeat", {"epoch": 1, "running": True})
    metrics = {"perf/max_rss_gb": 18.0}
    reports = [
        events.step(n + 1, n, **metrics) | {"elapsed_s": 2.5 * n, "generated_tokens": 800 * n, "device_seconds": 2.5 * n}
        for n in (1, 2, 3)
    ]
    assert worker.send_events(attempt.pk, [events.started(1), *reports]).status_code == 200
    detail = client.get(f"/api/v1/runs/{run.pk}").json()["plan"]
    assert detail["plan"]["time"]["step_s"] == pytest.approx(2.0)
    figures = {figure["name"]: figure for figure in detail["figures"]}
    assert figures["step_s"] == {
        "name": "step_s", "planned": pytest.approx(2.0), "actual": 2.5, "deviation": pytest.approx(0.25), "projected": False,
    }  # fmt: skip
    assert (figures["duration_s"]["actual"], figures["duration_s"]["projected"]) == (15.0, True)
    assert figures["device_hours"]["actual"] == pytest.approx(15 / 3600)
    assert figures["peak_memory_bytes"]["actual"] == 18_000_000_000
    assert figures["peak_memory_bytes"]["deviation"] == pytest.approx(0.2)
    assert (figures["wait_s"]["planned"], figures["wait_s"]["actual"]) == (0, 30)
    assert client.get("/api/v1/runs").json()["items"][0].keys().isdisjoint({"plan"}), "lists do not read plans"
    page = client.get(f"/runs/{run.pk}").content.decode()
    assert "Plan and actual" in page
    assert "+25 %" in page


def test_a_fork_is_measured_by_its_own_steps(world, report, make_spec, events, settings):
    settings.OPPO_ARTIFACTS_SHARED = True
    worker = report()
    parent, _ = trained(world, worker, events, models=actor(), steps=40, step_s=10.0, tokens=8000, saved_at=40)
    fork, attempt_id = world.start(worker, models=actor(), steps=50, fork={"run": parent.pk, "step": 40})
    Run.objects.filter(pk=fork.pk).update(plan=validate(world.login("ada"), make_spec(models=actor())))

    def send(*steps):
        reports = [
            events.step(1 + n, 40 + n, **{"timing_s/gen": 2.5, "prompt_length/mean": 10.0, "perf/max_rss_gb": 15.0})
            | {"elapsed_s": 400.0 + 5 * n, "generated_tokens": 320_000 + 800 * n, "device_seconds": 2 * (400.0 + 5 * n)}
            for n in steps
        ]
        started = [events.started(1, 40)] if 1 in steps else []
        assert worker.send_events(attempt_id, [*started, *reports]).status_code == 200
        fork.refresh_from_db()
        return {figure["name"]: figure["actual"] for figure in plan_review(fork)["figures"]}

    spec = load_spec(make_spec(models=actor()))
    figures = send(1)
    assert (figures["step_s"], figures["duration_s"], figures["device_hours"]) == (None, None, None)
    assert [run.run_id for run in earlier_runs(world.team.pk, spec, "cpu", "EPYC")] == [parent.pk]
    figures = send(2, 3, 4)
    assert figures["step_s"] == pytest.approx(5.0)
    assert figures["duration_s"] == pytest.approx(50.0)
    assert figures["device_hours"] == pytest.approx(10 * 2 * 5 / 3600)
    own = earlier_runs(world.team.pk, spec, "cpu", "EPYC")[0]
    assert (own.run_id, own.step_s, own.response) == (fork.pk, pytest.approx(5.0), pytest.approx(800 / spec.ppo.rows))


def test_an_older_run_has_no_plan(world, report):
    report()
    run = world.submit()
    assert plan_review(run) is None
    client = world.login("ada")
    assert client.get(f"/api/v1/runs/{run.pk}").json()["plan"] is None
    assert "Plan and actual" not in client.get(f"/runs/{run.pk}").content.decode()


def test_a_deviation_needs_both_figures():
    plan = {
        "planned_at": "2026-11-01T12:00:00Z", "start": {"at": None}, "memory": {"devices": [], "expected_bytes": None},
        "time": {"step_s": 2.0, "duration_s": 0.0, "device_hours": None},
    }  # fmt: skip
    actual = {"wait_s": (5.0, False), "step_s": (1.0, False), "duration_s": (3.0, True), "device_hours": (None, True),
              "peak_memory_bytes": (7, False)}  # fmt: skip
    deviations = {figure["name"]: figure["deviation"] for figure in compare_plan(plan, actual)}
    assert deviations == {"wait_s": None, "step_s": -0.5, "duration_s": None, "device_hours": None, "peak_memory_bytes": None}


def test_the_peak_of_a_node_is_that_of_all_its_ranks(world, report, make_spec, events):
    worker = report()
    resources = {"kind": "cpu", "processes": 2}
    trained(world, worker, events, models=actor(), resources=resources, peak_gb=9.0)
    spec = load_spec(make_spec(models=actor(), resources=resources))
    (run,) = earlier_runs(world.team.pk, spec, "cpu", "EPYC")
    assert run.peak_bytes == 18_000_000_000


def test_a_fork_waits_for_the_node_that_has_its_checkpoint(world, report, make_spec, events, settings, tmp_path):
    settings.OPPO_ARTIFACT_ROOT, settings.OPPO_ARTIFACTS_SHARED = tmp_path.as_uri(), False
    here = report("node1")
    run, attempt_id = world.start(here)
    register(here, run, attempt_id, 5)
    report("node2")

    def start(**changes):
        return run_plan.plan_run(load_spec(make_spec(**changes)), {}, ClusterView(), world.team.pk)["start"]["text"]

    fork = {"run": run.pk, "step": 5}
    assert start() == "Its devices are free."
    assert start(fork=fork).startswith("Waits for 1 device"), "node2 does not have the checkpoint"
    settings.OPPO_ARTIFACTS_SHARED = True
    assert start(fork=fork) == "Its devices are free."


def test_memory_and_speed_are_those_of_one_node_that_the_run_fits_on(world, make_spec):
    def offer(name, model, count, memory):
        devices = {"cuda": count}
        facts = {"device_model": {"cuda": model}, "device_memory": {"cuda": memory}, "cpus": 8}
        return NodeOffer(name=name, devices=devices, models={}, prompts=frozenset(), **facts)

    spec = load_spec(make_spec(resources={"devices": 2, "kind": "cuda"}))
    small, large, larger = offer("a", "A10", 1, 24), offer("b", "A100", 8, 40), offer("c", "H100", 8, 80)
    for offers in itertools.permutations((small, large, larger)):
        assert run_plan.planned_offer(spec, offers, "cuda").name == "b", "too few devices on a; c has more memory"
    assert run_plan.planned_offer(spec, (small,), "cuda") is None

"""Runs that begin with a checkpoint of another run, and paused ones that go on from an older one of their own."""

import json

import pytest

from oppo_contract import load_spec
from oppo_contract.resume_rules import REFUSED, diff_specs, refusing_rule
from oppo_contract.spec_errors import SpecError
from oppo_platform.runs.attempts import artifact_url, latest_checkpoint
from oppo_platform.runs.forks import fork_problems, resume_at
from oppo_platform.runs.lifecycle import cancel_run
from oppo_platform.runs.models import Checkpoint, Run
from oppo_platform.runs.resume_sources import pinned_for_forks
from oppo_platform.runs.services import submit_run
from oppo_platform.storage.retention import unprotected_runs
from oppo_platform.storage.trash import DeletionRefused, delete_run

DEEPER = {"actor": {"tiny": {"context": 1024, "layers": 3}}, "reward": {"rule": "letters:score"}}


def register(worker, run, attempt_id, step, epoch=1):
    told = {
        "epoch": epoch,
        "step": step,
        "url": f"{artifact_url(run.pk)}/checkpoints/step-{step:08d}",
        "manifest_sha256": "a" * 64,
        "bytes": 1,
    }
    assert worker.attempt(attempt_id, "checkpoints", told).status_code == 200
    return Checkpoint.objects.get(run=run, attempt=attempt_id, step=step)


def paused(worker, run, attempt_id, world, epoch=1):
    """The run's engine has saved and stopped, because somebody asked it to pause."""
    world.login("ada").post(f"/api/v1/runs/{run.pk}/pause")
    told = {"epoch": epoch, "outcome": "paused", "exit_code": 0, "reason": "asked to stop", "last_log_lines": []}
    assert worker.attempt(attempt_id, "outcome", told).status_code == 200
    run.refresh_from_db()
    assert run.state == "paused"


@pytest.fixture
def parent(world, settings):
    """(world, worker, run, attempt): a run that trains and has saved after steps 20 and 40."""
    settings.OPPO_ARTIFACTS_SHARED = True
    worker = world.worker(devices=2)
    run, attempt_id = world.start(worker)
    for step in (20, 40):
        register(worker, run, attempt_id, step)
    return world, worker, run, attempt_id


def submit(client, spec):
    return client.post("/api/v1/runs", {"spec": spec}, content_type="application/json")


def fork(client, run, path="fork", **body):
    return client.post(f"/api/v1/runs/{run.pk}/{path}", body, content_type="application/json")


def test_a_fork_by_one_call(parent):
    """The run's own spec with other values, in its project; from a step, or from the very checkpoint."""
    world, _, run, _ = parent
    ben, last = world.login("ben"), run.checkpoints.get(step=40)
    anew = fork(ben, run, changes={"seed": 7, "ppo.batch_size": 32}, name="seven").json()
    begun, from_last = fork(ben, run, step=20).json(), fork(ben, run, f"checkpoints/{last.pk}/fork").json()
    made = Run.objects.in_bulk([anew["id"], begun["id"], from_last["id"]])
    assert (made[anew["id"]].name, made[anew["id"]].project_id, made[anew["id"]].user.username) == (
        "seven",
        run.project_id,
        "ben",
    )
    assert (made[anew["id"]].spec["seed"], made[anew["id"]].spec["ppo"]["batch_size"]) == (7, 32)
    assert [made[told["id"]].forked_step for told in (anew, begun, from_last)] == [None, 20, 40]
    assert made[begun["id"]].name == "demo fork"


def test_a_stored_run_with_a_retired_setting_is_shown_delivered_and_forked(parent):
    """Stored before the drafter was removed. Its page shows the spec as it was; an engine and a fork get it without."""
    world, worker, run, _ = parent
    run.spec["overlap"]["drafter"] = {"max_rows": 2, "tokens": 4, "match": 2}
    run.save(update_fields=["spec"])
    ben = world.login("ben")
    assert "max_rows: 2" in ben.get(f"/api/v1/runs/{run.pk}/spec.yaml").content.decode()
    begun = Run.objects.get(pk=fork(ben, run, step=20).json()["id"])
    assert "drafter" not in begun.spec["overlap"]
    begun.spec["overlap"]["drafter"] = run.spec["overlap"]["drafter"]
    begun.save(update_fields=["spec"])
    world.cycle()
    assert "drafter" not in worker.claim(begun.attempts.get().pk).json()["spec"]["overlap"]


def test_a_fork_that_cannot_be_is_refused_field_by_field(parent):
    world, _, run, _ = parent
    ben = world.login("ben")
    for changes, path in (
        ({"seed.x": 1}, "seed.x"),
        ({"ppo.batch_sise": 1}, "ppo.batch_sise"),
        ({"models.actor.tiny.layers": 9}, "models.actor"),
    ):
        reply = fork(ben, run, changes=changes, step=20)
        assert (reply.status_code, reply.json()["errors"][0]["path"][: len(path)]) == (422, path), reply.json()
    assert fork(ben, run, step=21).json()["errors"][0]["path"] == "fork.step"
    assert fork(ben, run, "checkpoints/99999999999999999999/fork").status_code == 404
    assert fork(ben, run, odd=1).status_code == 422
    assert Run.objects.count() == 1


def test_a_run_with_a_retired_value_is_shown_as_it_was_and_forked_with_its_replacement(parent):
    world, _, run, _ = parent
    run.spec["ppo"] |= {"on_nonfinite": "rollback", "nonfinite_limit": 5}
    run.save(update_fields=["spec"])
    ben = world.login("ben")
    assert ben.get(f"/runs/{run.pk}").status_code == 200
    assert b"rollback" in ben.get(f"/api/v1/runs/{run.pk}/spec.yaml").content
    reply = fork(ben, run, step=20)
    assert reply.status_code == 201, reply.content
    assert Run.objects.get(pk=reply.json()["id"]).spec["ppo"]["on_nonfinite"] == "skip"


def test_a_fork_begins_with_the_checkpoint_and_says_so(parent, make_spec):
    world, worker, run, _ = parent
    told = submit(world.login("ben"), make_spec(name="fork", fork={"run": run.pk, "step": 20}))
    assert told.status_code == 201, told.content
    fork = Run.objects.get(pk=told.json()["id"])
    world.cycle()
    claimed = worker.claim(fork.attempts.get().pk).json()
    assert claimed["resume_from"] == {
        "step": 20,
        "url": f"{artifact_url(run.pk)}/checkpoints/step-00000020",
        "manifest_sha256": "a" * 64,
    }
    assert "fork" not in claimed["spec"]
    assert fork.attempts.get().start_step == 20
    client = world.login("vic")
    assert client.get(f"/api/v1/runs/{fork.pk}").json()["forked_from"] == {"run": run.pk, "step": 20}
    assert client.get(f"/api/v1/runs/{run.pk}").json()["forked_from"] is None
    assert f'forked from <a href="/runs/{run.pk}">run {run.pk}</a> at step 20' in " ".join(
        client.get(f"/runs/{fork.pk}").content.decode().split()
    )


def test_it_resumes_from_its_own_once_it_has_one(parent, make_spec):
    world, worker, run, _ = parent
    fork = world.submit(name="fork", fork={"run": run.pk, "step": 40})
    assert latest_checkpoint(fork).step == 40
    world.cycle()
    attempt = fork.attempts.get()
    worker.claim(attempt.pk)
    register(worker, fork, attempt.pk, 60)
    assert (latest_checkpoint(fork).step, latest_checkpoint(fork).run_id) == (60, fork.pk)
    assert latest_checkpoint(run).step == 40


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"fork": {"run": 999_999, "step": 20}}, "fork.run", "not a run of this team"),
        ({"fork": {"step": 30}}, "fork.step", "not a step with a checkpoint"),
        ({"steps": 40, "fork": {"step": 40}}, "steps", "leaves no steps to train"),
        ({"seed": 5}, "seed", "unfinished responses"),
        ({"ppo": {"batch_size": 8}}, "ppo.batch_size", "batches of that size"),
        ({"models": DEEPER}, "models.actor.tiny.layers", "belong"),
    ],
)  # fmt: skip
def test_incompatible_fork_is_refused_with_the_field(parent, make_spec, changes, path, words):
    world, _, run, _ = parent
    fork = {"run": run.pk, "step": 20} | changes.get("fork", {})
    told = submit(world.login("ben"), make_spec(**{**changes, "fork": fork}))
    assert told.status_code == 422
    complaint = next(error for error in told.json()["errors"] if error["path"] == path)
    assert words in complaint["message"]
    assert not Run.objects.exclude(pk=run.pk).exists()


def test_fork_accepts_only_settings_that_may_change(parent, make_spec):
    world, _, run, _ = parent
    fine = make_spec(steps=500, ppo={"learning_rate": 1e-6}, fork={"run": run.pk, "step": 20}, checkpoints={"every_steps": 7})
    assert submit(world.login("ben"), fine).status_code == 201
    refused = {
        rule
        for change in diff_specs(load_spec(run.spec), load_spec(make_spec(seed=1, rollout={"temperature": 0.5})))
        if (rule := refusing_rule(change.path))
    }
    assert refused == {"seed", "rollout"} <= REFUSED.keys()


@pytest.mark.parametrize(
    ("before", "least"), [({}, 8), ({"controller": "fixed", "initial": 5}, 5), ({"controller": "fixed", "initial": 4}, None)]
)
def test_a_fork_has_room_for_the_answers_of_a_half_done_step(parent, make_spec, before, least):
    world, _, run, _ = parent
    run.spec = load_spec(make_spec(overlap={"overcommit": before})).model_dump(mode="json")
    run.save(update_fields=["spec"])
    Checkpoint.objects.filter(run=run, step=40).update(url=f"{artifact_url(run.pk)}/checkpoints/step-00000040-chunk-000002")

    def problems(step, most):
        overlap = {"overcommit": {"initial": 0, "max": most, "controller": "fixed"}}
        spec = load_spec(make_spec(overlap=overlap, fork={"run": run.pk, "step": step}))
        return [(p.path, p.value, p.allowed) for p in fork_problems(spec, world.team.pk)]

    refused = ("overlap.overcommit.max", "4", f"at least {least}, or a checkpoint between two steps")
    assert problems(40, 4) == ([refused] if least else [])
    assert problems(40, least or 4) == []
    assert problems(20, 0) == []


def test_too_many_sequences_in_flight_are_refused_at_submit(parent, make_spec):
    world, _, run, _ = parent
    group = {"algorithm": "grpo", "group_size": 4, "batch_size": 8, "mini_batches": 1}
    run.spec = load_spec(make_spec(ppo=group)).model_dump(mode="json")
    run.save(update_fields=["spec"])
    Checkpoint.objects.filter(run=run, step=40).update(url=f"{artifact_url(run.pk)}/checkpoints/step-00000040-chunk-000002")
    fewer = make_spec(ppo=group, overlap={"overcommit": {"max": 6}}, fork={"run": run.pk, "step": 40})
    told = submit(world.login("ben"), fewer)
    assert told.status_code == 422
    [complaint] = told.json()["errors"]
    assert complaint["path"] == "overlap.overcommit.max"
    assert complaint["message"] == "allows 56 responses in flight, but this mid-step checkpoint may contain 64"
    assert complaint["allowed"] == "at least 8, or a checkpoint between two steps"


def test_a_checkpoint_of_another_team_does_not_exist(parent, make_spec):
    world, _, run, _ = parent
    told = submit(world.login("eve"), make_spec(fork={"run": run.pk, "step": 20}))
    assert [error["path"] for error in told.json()["errors"]] == ["fork.run"]


def test_the_parents_engine_keeps_what_a_fork_waits_for(parent):
    world, worker, run, attempt_id = parent
    fork = world.submit(name="fork", fork={"run": run.pk, "step": 20})
    orders = worker.attempt(attempt_id, "heartbeat", {"epoch": 1, "running": True}).json()
    assert orders["spare"] == ["step-00000020"]
    world.cycle()
    worker.claim(fork.attempts.get().pk)
    register(worker, fork, fork.attempts.get().pk, 30)
    assert pinned_for_forks(run) == []
    other = world.submit(name="other", fork={"run": run.pk, "step": 40})
    assert pinned_for_forks(run) == ["step-00000040"]
    cancel_run(other.pk, "user:ada")
    assert pinned_for_forks(run) == []


def test_of_a_deletion_and_a_fork_the_later_one_is_refused(parent, make_spec):
    world, _, run, _ = parent
    Run.objects.filter(pk=run.pk).update(state="succeeded", ended_at=world.clock.now())
    assert unprotected_runs(world.team.pk).filter(pk=run.pk).exists()
    spec = load_spec(make_spec(fork={"run": run.pk, "step": 20}))
    fork = submit_run(world.people["ben"], world.project, spec)
    with pytest.raises(DeletionRefused, match="Delete it after"):
        delete_run(run.pk, "user:ada")
    assert not unprotected_runs(world.team.pk).filter(pk=run.pk).exists(), "nor does its team's retention take the checkpoint"
    cancel_run(fork.pk, "user:ada")
    delete_run(run.pk, "user:ada")
    with pytest.raises(SpecError, match=r"fork\.run"):
        submit_run(world.people["ben"], world.project, spec)


def test_at_the_same_time_one_of_them_wins(parent, make_spec, at_once):
    world, _, run, _ = parent
    Run.objects.filter(pk=run.pk).update(state="succeeded")
    spec = load_spec(make_spec(fork={"run": run.pk, "step": 20}))
    found = at_once(lambda: submit_run(world.people["ben"], world.project, spec), lambda: delete_run(run.pk, "user:ada"))
    run.refresh_from_db()
    forks = Run.objects.exclude(pk=run.pk)
    assert isinstance(found[0], SpecError) if run.deleted_at else isinstance(found[1], DeletionRefused)
    assert forks.exists() == (run.deleted_at is None)


def test_a_fork_whose_checkpoint_is_gone_fails_and_does_not_begin_at_zero(parent):
    world, worker, run, _ = parent
    fork = world.submit(name="fork", fork={"run": run.pk, "step": 20})
    Checkpoint.objects.filter(run=run).delete()
    world.cycle()
    assert worker.claim(fork.attempts.get().pk).status_code == 409
    fork.refresh_from_db()
    assert (fork.state, "has been deleted" in fork.error + fork.reason) == ("failed", True)


def test_without_shared_storage_it_waits_for_the_node_that_has_the_checkpoint(parent, settings):
    from oppo_platform.scheduling.build_snapshot import build_snapshot

    world, _, run, _ = parent
    settings.OPPO_ARTIFACTS_SHARED = False
    fork = world.submit(name="fork", fork={"run": run.pk, "step": 20})
    (waiting,) = build_snapshot(world.clock.now()).waiting
    assert (waiting.run_id, waiting.home[1]) == (fork.pk, "node1")


def test_a_paused_run_goes_on_from_an_older_checkpoint(parent):
    world, worker, run, attempt_id = parent
    old = Checkpoint.objects.get(run=run, step=20)
    ada = world.login("ada")
    url = f"/api/v1/runs/{run.pk}/checkpoints/{old.pk}/resume"
    assert "Only a paused run" in ada.post(url).json()["detail"]
    paused(worker, run, attempt_id, world)
    assert "Resume from here" in " ".join(ada.get(f"/runs/{run.pk}/checkpoints").content.decode().split())
    assert world.login("vic").post(url).status_code == 403
    assert world.login("eve").post(url).status_code == 404
    assert ada.post(f"/api/v1/runs/{run.pk}/checkpoints/{2**62}/resume").status_code == 404
    assert ada.post(url).json()["state"] == "queued"
    world.cycle()
    attempt = run.attempts.get(epoch=2)
    assert (attempt.resume_from_id, attempt.start_step) == (old.pk, 20)
    items = {item["step"]: item["resumes"] for item in ada.get(f"/api/v1/runs/{run.pk}/checkpoints").json()["items"]}
    assert items == {40: False, 20: True}
    worker.claim(attempt.pk, epoch=2)
    register(worker, run, attempt.pk, 30, epoch=2)
    run.refresh_from_db()
    assert latest_checkpoint(run).step == 30, "the 40 of before is another life's"


def test_of_two_that_choose_a_checkpoint_at_once_one_is_told(parent, at_once):
    from oppo_platform.runs.lifecycle import NotPossible

    world, worker, run, attempt_id = parent
    paused(worker, run, attempt_id, world)
    both = Checkpoint.objects.filter(run=run).order_by("step")
    found = at_once(*(lambda pk=row.pk: resume_at(run.pk, pk, "user:ada") for row in both))
    assert sorted(isinstance(result, NotPossible) for result in found) == [False, True]
    run.refresh_from_db()
    assert latest_checkpoint(run).pk == both[found.index(None)].pk


def test_the_submit_form_opens_with_the_checkpoint(parent):
    world, _, run, _ = parent
    ben = world.login("ben")
    assert f"/runs/new?from={run.pk}&amp;step=20" in ben.get(f"/runs/{run.pk}/checkpoints").content.decode()
    assert "&amp;step=20" not in world.login("vic").get(f"/runs/{run.pk}/checkpoints").content.decode()
    page = ben.get(f"/runs/new?from={run.pk}&step=20").content.decode()
    data = json.loads(page.split('id="submit-data" type="application/json">')[1].split("</script>")[0])
    assert data["spec"]["fork"] == {"run": run.pk, "step": 20}
    assert "at step 20, with its state" in " ".join(page.split())


def gone_back(parent):
    """(world, worker, run, second attempt): the run was paused after step 40 and trains again from step 20 on."""
    world, worker, run, attempt_id = parent
    paused(worker, run, attempt_id, world)
    resume_at(run.pk, Checkpoint.objects.get(run=run, step=20).pk, "user:ada")
    world.cycle()
    attempt = run.attempts.get(epoch=2)
    worker.claim(attempt.pk, epoch=2)
    return world, worker, run, attempt.pk


def test_checkpoint_of_steps_that_are_trained_again_cannot_be_forked(parent, make_spec):
    world, worker, run, attempt_id = gone_back(parent)
    told = submit(world.login("ben"), make_spec(name="fork", fork={"run": run.pk, "step": 40}))
    assert told.status_code == 422
    assert "is being trained again" in told.json()["errors"][0]["message"]
    register(worker, run, attempt_id, 40, epoch=2)
    assert submit(world.login("ben"), make_spec(name="fork", fork={"run": run.pk, "step": 40})).status_code == 201
    fork = Run.objects.get(name="fork")
    assert (fork.begins_with.attempt_id, fork.begins_with.step) == (attempt_id, 40)


def test_of_a_folder_that_is_written_anew_one_row_is_left(parent):
    _, worker, run, attempt_id = gone_back(parent)
    register(worker, run, attempt_id, 40, epoch=2)
    rows = Checkpoint.objects.filter(run=run).order_by("step").values_list("step", "attempt__epoch")
    assert list(rows) == [(20, 1), (40, 2)]


def test_a_run_does_not_go_back_while_another_waits_for_what_it_would_write_anew(parent):
    from oppo_platform.runs.lifecycle import NotPossible

    world, worker, run, attempt_id = parent
    fork = world.submit(name="fork", fork={"run": run.pk, "step": 40})
    paused(worker, run, attempt_id, world)
    with pytest.raises(NotPossible, match=f"Run {fork.pk} is about to start"):
        resume_at(run.pk, Checkpoint.objects.get(run=run, step=20).pk, "user:ada")
    cancel_run(fork.pk, "user:ada")
    resume_at(run.pk, Checkpoint.objects.get(run=run, step=20).pk, "user:ada")

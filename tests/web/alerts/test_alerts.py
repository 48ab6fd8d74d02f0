"""Alerts on real PostgreSQL: opened once, closed when their condition ends, told exactly once, seen by whom they concern."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from oppo_platform.alerts import services
from oppo_platform.alerts.evaluator import evaluate_runs
from oppo_platform.alerts.lifecycle import close_alert, open_alert, with_related
from oppo_platform.alerts.models import Alert, Delivery, Ending, MailChoice, Watch, Webhook
from oppo_platform.alerts.policy import Condition, Rule
from oppo_platform.alerts.rules import set_rules, team_rules
from oppo_platform.runs.lifecycle import cancel_run, pause_run
from oppo_platform.runs.models import Run
from tests.web.event_factories import run_round

C = Condition
KL, REWARD = "objective/kl", "critic/score/mean"


def conditions(**wanted):
    return list(Alert.objects.filter(**wanted).order_by("id").values_list("condition", flat=True))


def end(tell, outcome, reason):
    reply = tell.worker.attempt(tell.attempt_id, "outcome", {"epoch": 1, "outcome": outcome, "reason": reason})
    assert reply.status_code == 200


def test_kl_opens_over_the_whole_window_and_closes_well_below(training):
    world, _, tell = training
    assert tell(*range(1, 20), objective__kl=60.0) == 0  # 19 steps are no window yet
    assert tell(20, objective__kl=60.0) == 1
    alert = Alert.objects.get()
    assert (alert.condition, alert.value, alert.threshold, alert.step, alert.team) == (C.KL_ABOVE, 60.0, 50.0, 20, world.team)
    assert tell(*range(21, 41), objective__kl=47.0) == 0  # below 50, and not by a tenth of it
    assert tell(*range(41, 61), objective__kl=40.0) == 1
    alert.refresh_from_db()
    assert alert.closed_at == world.clock.now()
    assert "40" in alert.closed_why
    assert tell(*range(61, 81), objective__kl=60.0) == 1  # it may come again
    assert conditions() == [C.KL_ABOVE] * 2


def test_one_lucky_batch_fires_nothing(training):
    _, _, tell = training
    tell(*range(1, 30), objective__kl=10.0)
    assert tell(30, objective__kl=500.0) == 0


def test_not_finite_alert_stays_open_until_the_window_has_passed(training):
    _, _, tell = training
    tell(1, actor__pg_loss=0.1)
    assert tell(2, 3, actor__pg_loss="NaN") == 1
    assert "actor/pg_loss was NaN in step 3" in Alert.objects.get().why
    assert tell(*range(4, 23), actor__pg_loss=0.1) == 0
    assert tell(23, actor__pg_loss=0.1) == 1
    assert conditions(closed_at=None) == []


def test_undefined_metrics_open_no_alert(training):
    _, _, tell = training
    assert tell(1, critic__vf_explained_var="NaN", perf__throughput="Infinity") == 0


def test_extreme_numbers_do_not_break_the_housekeeper(training):
    _, _, tell = training
    absurd = {"objective/kl": 1e308, "critic/score/mean": -1e308, "bubble/cpu:0": 1e308, "timing_s/step": 1e308}
    assert tell(*range(1, 41), **absurd) == 0
    assert Watch.objects.get().reward["count"] == 0


def test_skipped_step_opens_an_alert(training, events):
    _, _, tell = training
    tell(1, actor__pg_loss=0.1)
    told = {"controller": "nonfinite", "old": 2, "new": 3, "reason": "skip: the actor's loss is not finite"}
    skipped = {"kind": "decision", "producer": "engine", "seq": 3, "time": 1002.0, "step": 2, **told}
    tell.worker.send_events(tell.attempt_id, [skipped, events.step(4, 3, **{"oppo/nonfinite_steps": 1.0})])
    assert evaluate_runs() == 1
    assert "the actor's loss is not finite" in Alert.objects.get().why


def test_idle_devices_open_an_alert(training):
    _, _, tell = training
    assert tell(*range(1, 20), **{"bubble/cpu:0": 0.95, "bubble/cpu:1": 0.85}) == 0
    assert tell(20, **{"bubble/cpu:0": 0.95, "bubble/cpu:1": 0.85}) == 1
    assert Alert.objects.get().value == pytest.approx(0.9)


def test_the_reward_collapses_after_it_has_gained(training):
    _, _, tell = training
    assert tell(*range(1, 61), critic__score__mean=lambda step: step / 60) == 0
    assert tell(*range(61, 100), critic__score__mean=0.2) == 1
    assert conditions(closed_at=None) == [C.REWARD_COLLAPSED]
    assert tell(*range(100, 110), critic__score__mean=0.2) == 0
    assert "of its gain since" in Alert.objects.get().why


def test_stalled_alert_opens_and_closes_with_the_next_step(training):
    world, _, tell = training
    tell(1, m=1.0)
    world.clock.advance(590)
    assert evaluate_runs() == 0
    world.clock.advance(11)
    assert evaluate_runs() == 1
    assert "No step after step 1 for 10 m" in Alert.objects.get().why
    assert evaluate_runs() == 0
    assert tell(2, m=1.0) == 1
    assert conditions(closed_at=None) == []


def test_platform_downtime_does_not_count_as_stalled(training):
    world, _, tell = training
    tell(1, m=1.0)
    world.clock.advance(3600)
    assert evaluate_runs(away=timedelta(seconds=3600)) == 0
    world.clock.advance(601)
    assert evaluate_runs(away=timedelta(seconds=5)) == 1


def test_the_first_step_may_take_longer(training):
    world, _, _ = training
    evaluate_runs()
    world.clock.advance(1790)
    assert evaluate_runs() == 0
    world.clock.advance(20)
    assert evaluate_runs() == 1


@pytest.mark.parametrize(
    ("outcome", "reason", "told"),
    [
        ("succeeded", "All steps are done.", [C.FINISHED]),
        ("failed", "RewardError: the rule raised", [C.FAILED]),
        ("failed", "NonFiniteError: the actor's loss is NaN", [C.NOT_FINITE, C.FAILED]),
    ],
)
def test_end_is_announced_once_and_closes_open_alerts(training, outcome, reason, told):
    _, run, tell = training
    tell(*range(1, 21), objective__kl=60.0)
    end(tell, outcome, reason)
    assert Ending.objects.filter(run=run).exists()
    evaluate_runs()
    assert conditions() == [C.KL_ABOVE, *told]
    assert conditions(closed_at=None) == []
    assert evaluate_runs() == 0
    assert not Ending.objects.exists()
    assert not Watch.objects.exists()


def test_a_cancelled_run_closes_and_announces_nothing(world):
    run = world.submit()
    cancel_run(run.pk, "user:ada")
    assert evaluate_runs() == 0
    assert not Ending.objects.exists()


def test_paused_run_closes_stalled_and_keeps_kl_open(training):
    world, run, tell = training
    tell(*range(1, 21), objective__kl=60.0)
    world.clock.advance(601)
    evaluate_runs()
    assert conditions(closed_at=None) == [C.KL_ABOVE, C.STALLED]
    pause_run(run.pk, "user:ada")
    evaluate_runs()
    assert conditions(closed_at=None) == [C.KL_ABOVE]


def test_newer_attempt_that_repeats_steps_resets_the_reward_memory(training, events):
    """The steps that it tells again replace the old ones: their KL, and their part of the reward's memory."""
    world, run, tell = training
    tell(*range(1, 31), critic__score__mean=lambda step: step / 10, objective__kl=60.0)
    best = Watch.objects.get().reward["best"]
    tell.worker.attempt(tell.attempt_id, "outcome", {"epoch": 1, "outcome": "engine_died", "reason": "killed", "exit_code": -9})
    world.cycle()
    second = run.attempts.get(epoch=2)
    tell.worker.claim(second.pk, 2)
    tell.worker.attempt(second.pk, "heartbeat", {"epoch": 2, "running": True})
    again = [events.step(1 + step, step, **{REWARD: 0.5, KL: 1.0}) for step in range(11, 31)]
    tell.worker.send_events(second.pk, [events.started(1, 10), *[{**e, "seq": i} for i, e in enumerate(again, 2)]])
    evaluate_runs()
    watch = Watch.objects.get()
    assert (watch.reward_step, watch.reward_epoch) == (30, 2)
    assert watch.reward["best"] < best
    assert conditions(closed_at=None) == []


def test_disabled_rules_and_silenced_runs_open_no_alerts(training):
    world, run, tell = training
    tell(*range(1, 21), objective__kl=60.0, actor__pg_loss="NaN")
    assert conditions(closed_at=None) == [C.KL_ABOVE, C.NOT_FINITE]
    set_rules(world.people["ada"], world.team, {C.KL_ABOVE: Rule(False, 50.0, 20)})
    assert conditions(closed_at=None) == [C.NOT_FINITE]
    tell(21, objective__kl=60.0, actor__pg_loss="NaN")
    assert conditions(closed_at=None) == [C.NOT_FINITE]
    assert services.silence(world.people["ada"], run.pk, True)
    assert not services.silence(world.people["ada"], run.pk, True)
    assert conditions(closed_at=None) == []
    end(tell, "failed", "RewardError: x")
    evaluate_runs()
    assert conditions() == [C.KL_ABOVE, C.NOT_FINITE]


def test_rules_that_are_refused_stay_in_the_form(world):
    address = f"/teams/{world.team.pk}/alerts"
    ada, before = world.login("ada"), dict(team_rules(world.team.pk))
    page = ada.get(address).content.decode()
    form = dict(re.findall(r'name="([\w-]+-(?:threshold|window))" value="([^"]+)"', page))
    assert ada.post(f"{address}/rules", form | {"failed-on": "on"}).status_code == 302
    wrong = form | {"kl_above-threshold": "-7", "stalled-threshold": "77", "stalled-on": "on"}
    refused = ada.post(f"{address}/rules", wrong)
    page = refused.content.decode()
    assert (refused.status_code, "the threshold must be a number from" in page) == (422, True)
    assert 'name="kl_above-threshold" value="-7"' in page
    assert 'name="stalled-threshold" value="77"' in page
    assert re.findall(r'name="(\w+)-on" checked', page) == ["stalled"]
    after = team_rules(world.team.pk)
    assert {c: after[c].threshold for c in after} == {c: before[c].threshold for c in before}


def test_concurrent_evaluators_announce_once(training, at_once):
    world, _, tell = training
    hook = Webhook.objects.create(team=world.team, url="https://example.org/", sealed=b"", created_at=world.clock.now())
    tell(*range(1, 21), look=False, objective__kl=60.0, actor__pg_loss="NaN")
    results = at_once(*[evaluate_runs] * 3)
    assert sum(results) == 2
    assert Watch.objects.get().reward_step == 0  # it told no reward
    tell(*range(21, 26), look=False, critic__score__mean=1.0)
    at_once(evaluate_runs, evaluate_runs)
    assert Watch.objects.get().reward["count"] == 5  # each step once
    end(tell, "failed", "RewardError: x")
    results = at_once(*[evaluate_runs] * 3)
    assert sum(results) == 3
    assert sorted(conditions()) == sorted([C.KL_ABOVE, C.NOT_FINITE, C.FAILED])
    assert Delivery.objects.filter(webhook=hook).count() == 5  # three opened, two closed


def test_opening_and_closing_at_once_keeps_one_of_each(training, at_once):
    _, run, _ = training
    run = with_related(Run.objects).get(pk=run.pk)
    opened = at_once(*[lambda: open_alert(run, C.KL_ABOVE, "why", 1.0, 1.0)] * 3)
    assert sum(alert is not None for alert in opened) == 1
    closed = at_once(*[lambda: close_alert(run, C.KL_ABOVE, "over")] * 3)
    assert sum(alert is not None for alert in closed) == 1
    announced = at_once(*[lambda: open_alert(run, C.FAILED, "why")] * 3)
    assert sum(alert is not None for alert in announced) == 1


def test_stale_evaluation_opens_nothing_after_the_end(training, monkeypatch):
    from oppo_platform.alerts import evaluator

    _, run, tell = training
    tell(*range(1, 21), look=False, objective__kl=60.0)

    def meanwhile(*arguments):
        measured = real(*arguments)
        if not run.attempts.filter(state="ended").exists():
            end(tell, "failed", "RewardError: x")
            assert evaluator.announce_end(run.pk) == 1
        return measured

    real = evaluator.measure
    monkeypatch.setattr(evaluator, "measure", meanwhile)
    assert evaluate_runs() == 0
    assert conditions() == [C.FAILED]


def test_mail_follows_the_users_preferences(training, settings, mailoutbox):
    from oppo_platform.alerts.delivery import deliver_due

    world, run, tell = training
    settings.OPPO_SMTP_URL = "smtp://localhost"
    services.choose_mail(world.people["ben"], world.team, "all", ["failed"])
    services.choose_mail(world.people["max"], world.team, "own", list(Condition))
    tell(*range(1, 21), objective__kl=60.0)
    deliver_due()
    end(tell, "failed", "NonFiniteError: the loss is nan")
    evaluate_runs()
    deliver_due()
    assert sorted((mail.to[0], mail.subject) for mail in mailoutbox) == [
        ("ada@example.org", "[OPPO] 2 alerts: demo: Not finite; demo: Failed"),  # what is told at once is one mail
        ("ada@example.org", "[OPPO] demo: KL above"),
        ("ben@example.org", "[OPPO] demo: Failed"),
    ]
    assert all(f"/runs/{run.pk}" in mail.body for mail in mailoutbox)
    assert deliver_due() == 0
    page = f"/teams/{world.team.pk}/alerts"
    assert "was not sent" not in world.login("ada").get(page).content.decode()
    settings.EMAIL_BACKEND, settings.EMAIL_HOST, settings.EMAIL_PORT = (
        "django.core.mail.backends.smtp.EmailBackend",
        "127.0.0.1",
        1,
    )
    settings.OPPO_DELIVERY_TRIES = 1
    Delivery.objects.update(state="waiting", due_at=world.clock.now(), tries=0)
    deliver_due()
    told = world.login("ada").get(page).content.decode()
    assert "was not sent" in told
    assert "refused" in told
    assert MailChoice.objects.count() == 2


def test_the_list_the_bell_and_acknowledging(training):
    world, run, tell = training
    ada, ben, vic, eve = (world.login(name) for name in ("ada", "ben", "vic", "eve"))
    tell(*range(1, 21), objective__kl=60.0, actor__pg_loss="NaN")
    alerts = ada.get("/api/v1/alerts").json()["items"]
    assert [a["condition"] for a in alerts] == [C.NOT_FINITE, C.KL_ABOVE]
    assert ada.get("/api/v1/alerts/unread").json() == {"unread": 2}
    path = f"/api/v1/alerts/{alerts[0]['id']}/acknowledge"
    assert vic.post(path).status_code == 403
    assert eve.post(path).status_code == 404
    assert ben.post(path).json()["acknowledged_by"] == "ben"
    assert ada.post(path).json()["acknowledged_by"] == "ben"
    assert ada.get("/api/v1/alerts/unread").json() == {"unread": 1}
    seen = ada.post("/api/v1/alerts/seen", {"up_to": alerts[0]["id"]}, content_type="application/json")
    assert seen.json() == {"unread": 0}
    assert vic.get("/api/v1/alerts/unread").json() == {"unread": 1}
    assert eve.get("/api/v1/alerts").json() == {"items": [], "next": None}
    assert eve.get(f"/api/v1/alerts?run={run.pk}").status_code == 404
    assert eve.get(f"/api/v1/alerts?team={world.team.pk}").status_code == 404
    first = ada.get("/api/v1/alerts?limit=1").json()
    rest = ada.get("/api/v1/alerts", {"limit": 1, "cursor": first["next"]}).json()
    assert [a["id"] for a in first["items"] + rest["items"]] == [a["id"] for a in alerts]
    assert ada.get("/api/v1/alerts?condition=x").status_code == 422
    assert ada.get("/api/v1/alerts?cursor=x").status_code == 422
    told = ada.get(f"/api/v1/runs/{run.pk}").json()["alerts"]
    assert {a["condition"]: a["acknowledged_by"] for a in told} == {alerts[0]["condition"]: "ben", alerts[1]["condition"]: None}
    kinds = [e["kind"] for e in ada.get(f"/api/v1/runs/{run.pk}/events?kinds=alert,alert_closed").json()["items"]]
    assert kinds == ["alert", "alert"]


def test_alerts_of_a_deleted_run_are_gone_with_it(training):
    world, run, tell = training
    end(tell, "failed", "RewardError: x")
    run_round()
    ada = world.login("ada")
    assert [alert["condition"] for alert in ada.get("/api/v1/alerts").json()["items"]] == [C.FAILED]
    assert ada.delete(f"/api/v1/runs/{run.pk}").status_code == 200
    assert ada.get("/api/v1/alerts").json()["items"] == []
    assert ada.get("/api/v1/alerts/unread").json() == {"unread": 0}
    assert ada.post(f"/api/v1/alerts/{Alert.objects.get().pk}/acknowledge").status_code == 404


def test_runs_are_found_by_their_alerts(training):
    world, run, tell = training
    other = world.submit(name="calm")
    tell(*range(1, 21), objective__kl=60.0)

    def found(where):
        return [item["id"] for item in world.login("ada").get("/api/v1/runs", {"filter": where}).json()["items"]]

    assert found("alert:any") == found("alert:stalled,kl_above") == [run.pk]
    assert found("-alert:any") == [other.pk]
    assert found("alert:stalled") == []
    refused = world.login("ada").get("/api/v1/runs", {"filter": "alert:kl_abov"})
    assert (refused.status_code, "Did you mean “kl_above”?" in refused.json()["detail"]) == (422, True)
    assert "kl_above" in world.login("ada").get("/api/v1/runs/words").json()["values"]["alert"]


def test_silencing_over_http_is_for_who_may_steer(training):
    world, run, _ = training
    path = f"/api/v1/runs/{run.pk}/silence"
    for name, status in (("eve", 404), ("vic", 403), ("ben", 403), ("max", 200)):
        assert world.login(name).post(path, {"silent": True}, content_type="application/json").status_code == status
    history = world.login("ada").get(f"/api/v1/runs/{run.pk}/events?kinds=change").json()["items"]
    assert history[0]["text"] == "Alerts silenced."


DISK = "the disk of /data is too full, 0 bytes of 64 GiB free: the engine exited with status 1"


def test_a_node_that_ended_an_attempt_is_announced_once(training):
    """The run goes on by itself, but somebody must free the disk."""
    world, run, tell = training
    for _ in range(2):  # its supervisor may repeat the report
        end(tell, "node_failed", DISK)
    alert = Alert.objects.get()
    assert (alert.condition, alert.closed_at, alert.team) == (C.NODE_FAILED, world.clock.now(), world.team)
    assert alert.why.startswith(DISK)
    run.refresh_from_db()
    assert run.state == "queued"


@pytest.mark.parametrize("silence", ["rule", "run", "limit"])
def test_a_node_failure_is_not_announced_where_nobody_wants_it(training, settings, silence):
    world, run, tell = training
    if silence == "rule":
        set_rules(world.people["ada"], world.team, {**team_rules(world.team.pk), C.NODE_FAILED: Rule(on=False)})
    elif silence == "run":
        services.silence(world.people["ada"], run.pk, True)
    else:
        settings.OPPO_MAX_NODE_FAILURES = 1  # it has failed for good, which is announced instead
    end(tell, "node_failed", DISK)
    evaluate_runs()
    assert conditions() == ([C.FAILED] if silence == "limit" else [])


def test_an_engine_that_died_by_itself_is_no_node_failure(training):
    _, _, tell = training
    end(tell, "engine_died", "killed by signal 9")
    assert conditions() == []

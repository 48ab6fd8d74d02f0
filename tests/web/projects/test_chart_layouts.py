"""Pinned charts: one's own before the project's, who saves for whom, and what is refused."""

import pytest

from oppo_platform.projects.models import ChartLayout

ENTROPY = {"keys": ["actor/entropy"]}
LOSSES = {"title": "losses", "keys": ["actor/pg_loss", "critic/vf_loss", "actor/pg_loss"], "log": True}


def charts(client, world):
    return client.get(f"/api/v1/projects/{world.project.pk}/charts").json()


def save(client, world, *pinned, to=""):
    path = f"/api/v1/projects/{world.project.pk}/charts{to}"
    return client.post(path, {"charts": pinned}, content_type="application/json")


def test_own_charts_stand_before_those_of_the_project(world):
    ben, ada = world.login("ben"), world.login("ada")
    assert charts(ada, world) == {
        "project": world.project.pk, "charts": [], "own": False, "shared": False, "may_share": True,
    }  # fmt: skip
    assert save(ben, world, LOSSES).json()["charts"] == [{**LOSSES, "keys": ["actor/pg_loss", "critic/vf_loss"]}]
    assert charts(ada, world)["charts"] == []
    shared = save(ben, world, ENTROPY, to="/share").json()
    assert (shared["own"], shared["shared"]) == (False, True), "his own are dropped: he follows the project's"
    assert charts(ada, world)["charts"] == [{"title": "", "log": False, **ENTROPY}]
    save(ada, world)
    assert (charts(ada, world)["charts"], charts(ada, world)["own"]) == ([], True), "none, by her own choice"
    reset = ada.post(f"/api/v1/projects/{world.project.pk}/charts/reset").json()
    assert (reset["own"], len(reset["charts"])) == (False, 1)


def test_viewers_save_for_themselves_only_and_other_teams_see_nothing(world):
    vic, eve = world.login("vic"), world.login("eve")
    assert save(vic, world, ENTROPY).status_code == 200
    assert charts(vic, world)["may_share"] is False
    assert save(vic, world, ENTROPY, to="/share").status_code == 403
    assert save(eve, world, ENTROPY).status_code == 404
    assert save(eve, world, ENTROPY, to="/share").status_code == 404
    assert list(ChartLayout.objects.values_list("user__username", flat=True)) == ["vic"]


@pytest.mark.parametrize(
    "chart",
    [{"keys": []}, {"keys": [" "]}, {"keys": ["a"] * 13}, {"keys": ["x" * 201]}, {"keys": ["a\0"]}, {**ENTROPY, "color": 1},
     {"keys": ["a,b"]}, {"keys": ["a*"]}, {**ENTROPY, "title": "x" * 81}],
)  # fmt: skip
def test_an_invalid_chart_is_refused(world, chart):
    assert save(world.login("ben"), world, chart).status_code == 422
    assert save(world.login("ben"), world, *[ENTROPY] * 61).status_code == 422
    assert not ChartLayout.objects.exists()


def test_a_run_page_has_the_charts_of_its_project(world):
    run = world.submit()
    ben = world.login("ben")
    save(ben, world, {**LOSSES, "title": "</script><b>"})
    page = ben.get(f"/runs/{run.pk}").content.decode()
    assert '"own": true' in page
    assert "</script><b>" not in page

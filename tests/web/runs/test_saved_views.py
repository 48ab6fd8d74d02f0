"""Saved views of the runs table: whose they are, who changes them, and that a deleted one comes back as it was."""

import pytest

from oppo_platform.runs.models import DefaultView, SavedView
from oppo_platform.runs.saved_views import ViewRefused, save_view

QUERY = {"show": "ended", "q": "reward>1", "sort": "-reward", "cols": "state,reward,actor/entropy"}


def post(client, path, **body):
    return client.post(f"/api/v1/views{path}", body, content_type="application/json")


def names(client):
    return [item["name"] for item in client.get("/api/v1/views").json()["items"]]


def test_a_view_is_saved_named_replaced_and_stands_in_the_menu(world):
    world.submit()
    ben = world.login("ben")
    made = post(ben, "", name="  best  runs ", query={**QUERY, "after": "x", "view": "3"})
    assert made.status_code == 201
    view = made.json()
    assert (view["name"], view["query"], view["team"], view["may_change"]) == ("best runs", QUERY, "", True)
    assert names(world.login("ada")) == []
    page = ben.get("/runs").content.decode()
    assert "?show=ended&amp;q=reward%3E1&amp;sort=-reward&amp;cols=state,reward,actor/entropy&amp;view=" in page
    assert post(ben, f"/{view['id']}", name="better", query={"q": "kl<1"}).json()["query"] == {"q": "kl<1"}
    assert names(ben) == ["better"]
    assert post(world.login("ada"), f"/{view['id']}", name="mine").status_code == 404


def test_a_teams_view_is_changed_by_its_owner_and_by_maintainers(world):
    team = world.team.pk
    assert post(world.login("vic"), "", name="v", query={}, team=team).status_code == 403
    assert post(world.login("vic"), "", name="v", query={}).status_code == 201, "a viewer's own"
    assert post(world.login("eve"), "", name="e", query={}, team=team).status_code == 404
    view = post(world.login("ben"), "", name="ours", query=QUERY, team=team).json()
    assert names(world.login("vic")) == ["ours", "v"]
    assert names(world.login("eve")) == []
    for deed in ("", "/delete", "/restore"):
        assert post(world.login("eve"), f"/{view['id']}{deed}").status_code == 404
    assert post(world.login("vic"), f"/{view['id']}/delete").status_code == 403
    assert post(world.login("max"), f"/{view['id']}", name="theirs").json()["name"] == "theirs"
    told = {item["name"]: item["may_change"] for item in world.login("vic").get("/api/v1/views").json()["items"]}
    assert told == {"theirs": False, "v": True}


def test_a_name_is_taken_once_in_a_team_and_once_by_a_person(world):
    ben, ada = world.login("ben"), world.login("ada")
    assert post(ben, "", name="a", query={}).status_code == 201
    assert post(ada, "", name="a", query={}).status_code == 201
    assert "There is already a view with this name" in post(ben, "", name="a", query={}).json()["detail"]
    assert post(ben, "", name="a", query={}, team=world.team.pk).status_code == 201
    assert "In Letters there is already a view" in post(ada, "", name="a", query={}, team=world.team.pk).json()["detail"]


@pytest.mark.parametrize(
    ("name", "query"),
    [("", {}), ("x" * 61, {}), ("a\0", {}), ("n", {"q": "rewrd>1"}), ("n", {"q": "\0"}), ("n", {"sort": "-nothing"}),
     ("n", {"cols": "nothing"}), ("n", {"show": "odd"}), ("n", {"project": "x"}), ("n", {"project": "9" * 30}),
     ("n", {"project": "1" * 9})],
)  # fmt: skip
def test_invalid_view_is_refused(world, name, query):
    assert post(world.login("ben"), "", name=name, query=query).status_code == 422
    assert not SavedView.objects.exists()


def test_the_project_of_another_team_is_no_project(world):
    assert post(world.login("ben"), "", name="n", query={"project": str(world.other_project.pk)}).status_code == 422


def test_the_default_is_where_the_table_begins(world):
    world.submit()
    ben, vic = world.login("ben"), world.login("vic")
    view = post(ben, "", name="ours", query=QUERY, team=world.team.pk).json()
    post(vic, "/default", view=view["id"])
    assert vic.get("/runs").headers["Location"].endswith(f"cols=state,reward,actor/entropy&view={view['id']}")
    assert vic.get("/runs?view=all").status_code == 200
    assert "?show=active&amp;q=x&amp;view=all" in vic.get("/runs?q=x").content.decode()
    assert vic.get("/runs?part=rows").status_code == 200
    assert ben.get("/runs").status_code == 200
    assert post(world.login("eve"), "/default", view=view["id"]).status_code == 404
    assert post(vic, "/default", view=-1).status_code == 404
    post(vic, "/default", view=None)
    assert vic.get("/runs").status_code == 200


def test_a_deleted_view_comes_back_as_whose_default_it_was(world):
    ben = world.login("ben")
    view = post(ben, "", name="a", query=QUERY).json()
    post(ben, "/default", view=view["id"])
    assert post(ben, f"/{view['id']}/delete").status_code == 200
    assert (names(ben), ben.get("/runs").status_code) == ([], 200)
    assert post(ben, f"/{view['id']}/delete").status_code == 404
    back = post(ben, f"/{view['id']}/restore").json()
    assert (back["default"], back["query"]) == (True, QUERY)
    post(ben, f"/{view['id']}/delete")
    other = post(ben, "", name="a", query={}).json()
    assert "with this name" in post(ben, f"/{view['id']}/restore").json()["detail"]
    post(ben, f"/{other['id']}/delete")
    assert post(ben, f"/{view['id']}/restore").status_code == 404, "gone for good with the next one"
    assert SavedView.objects.count() == 1
    assert not DefaultView.objects.exists()


def test_former_members_do_not_see_a_teams_views(world):
    from oppo_platform.accounts.models import Membership

    ben = world.login("ben")
    view = post(ben, "", name="ours", query={}, team=world.team.pk).json()
    post(ben, "/default", view=view["id"])
    Membership.objects.filter(user=world.people["ben"]).delete()
    assert names(ben) == []
    assert ben.get("/runs").status_code == 200
    assert post(ben, f"/{view['id']}/delete").status_code == 404
    assert names(world.login("ada")) == ["ours"]


def test_of_two_that_save_a_name_at_once_one_is_told(world, at_once):
    found = at_once(*(lambda person=person: save_view(world.people[person], "x", {}, world.team) for person in ("ada", "ben")))
    assert sorted(isinstance(result, ViewRefused) for result in found) == [False, True]

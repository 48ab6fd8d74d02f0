"""Archived runs: hidden from lists until a filter says something of them, and nothing else."""

from oppo_platform.accounts.models import AuditEntry
from oppo_platform.runs.lifecycle import cancel_run
from oppo_platform.runs.models import Change


def names(client, where=""):
    return {item["name"] for item in client.get("/api/v1/runs", {"filter": where}).json()["items"]}


def test_an_archived_run_is_on_no_list_until_it_is_asked_for(world):
    old, new = world.submit(name="old"), world.submit(name="new")
    cancel_run(old.pk, "user:ada")
    ada = world.login("ada")
    told = ada.post(f"/api/v1/runs/{old.pk}/archive").json()
    assert (told["archived"], told["state"]) == (True, "cancelled")
    assert names(ada) == names(ada, "archived:no") == names(ada, "-archived:yes") == {"new"}
    assert names(ada, "archived:yes") == names(ada, "Archived:yes state:cancelled") == {"old"}
    assert names(ada, "archived:any") == names(ada, "archived:yes,no") == {"old", "new"}
    assert ada.get(f"/api/v1/runs/{old.pk}").status_code == ada.get(f"/runs/{old.pk}").status_code == 200
    assert f'href="/runs/{old.pk}"' not in ada.get("/runs").content.decode()
    assert f'href="/runs/{old.pk}"' in ada.get("/runs", {"q": "archived:yes"}).content.decode()
    for _ in range(2):
        assert ada.post(f"/api/v1/runs/{old.pk}/unarchive").json()["archived"] is False
    assert names(ada) == {"old", "new"}
    assert list(Change.objects.filter(run=old, what__endswith="archived").values_list("what", flat=True)) == [
        "archived",
        "unarchived",
    ]
    assert AuditEntry.objects.filter(action="run.change", target__contains="old").count() == 2
    assert new.state == "queued"


def test_live_run_cannot_be_archived(world):
    run = world.submit()
    reply = world.login("ada").post(f"/api/v1/runs/{run.pk}/archive")
    assert (reply.status_code, "Only ended runs" in reply.json()["detail"]) == (409, True)
    refused = world.login("ada").get("/api/v1/runs", {"filter": "archived:maybe"})
    assert (refused.status_code, "yes, no, any" in refused.json()["detail"]) == (422, True)

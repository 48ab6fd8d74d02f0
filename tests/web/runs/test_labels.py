"""A run's name, tags and notes after its submission: who changes them, what is refused, and how notes are shown."""

import pytest

from oppo_platform.accounts.models import AuditEntry
from oppo_platform.pages.markdown import render_markdown
from oppo_platform.runs.models import Run
from tests.web.conftest import tiny_spec


def post(client, path, **body):
    return client.post(f"/api/v1/runs{path}", body, content_type="application/json")


def test_a_run_is_renamed_and_its_spec_is_not(world):
    run = world.submit()
    renamed = post(world.login("ben"), f"/{run.pk}/rename", name="llama3/8b lr=1e-5 β")
    assert renamed.json()["name"] == "llama3/8b lr=1e-5 β"
    assert Run.objects.get(pk=run.pk).spec["name"] == "demo"
    assert Run.objects.get(pk=run.pk).cursor > run.cursor, "open pages learn of it"
    entry = AuditEntry.objects.filter(action="run.change").latest("id")
    assert (entry.actor, entry.details["renamed_from"]) == ("user:ben", "demo")
    assert post(world.login("vic"), f"/{run.pk}/rename", name="x").status_code == 403
    assert post(world.login("eve"), f"/{run.pk}/rename", name="x").status_code == 404
    for name in ("", " ", "two\nlines", "x" * 121, "a\u202eb"):
        assert post(world.login("ben"), f"/{run.pk}/rename", name=name).status_code == 422


def test_notes_are_markdown_on_the_page_and_text_in_the_api(world):
    run = world.submit()
    ben, notes = world.login("ben"), "**diverged**, see [log](https://example.org)\n\n<script>alert(1)</script>"
    assert post(ben, f"/{run.pk}/notes", text=notes).status_code == 200
    assert ben.get(f"/api/v1/runs/{run.pk}").json()["notes"] == notes
    page = ben.get(f"/runs/{run.pk}").content.decode()
    assert "<strong>diverged</strong>" in page
    assert "<script>alert" not in page
    assert post(world.login("vic"), f"/{run.pk}/notes", text="x").status_code == 403
    assert post(ben, f"/{run.pk}/notes", text="x" * 20_001).status_code == 422
    assert post(ben, f"/{run.pk}/notes", text="a\0").status_code == 422
    assert post(ben, f"/{run.pk}/notes", text="mine", before="what it was").status_code == 409
    assert ben.get(f"/api/v1/runs/{run.pk}").json()["notes"] == notes, "nobody's notes are lost"
    assert post(ben, f"/{run.pk}/notes", text="", before=notes).status_code == 200
    assert 'data-part="notes"' not in ben.get(f"/runs/{run.pk}").content.decode()


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
        ("![a](https://b.org/a.png)", '<p>!<a href="https://b.org/a.png" rel="nofollow noopener noreferrer">a</a></p>'),
        ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
        ("[a](//evil.example)", "<p>[a](//evil.example)</p>"),
        ("[a](/accounts/logout/)", "<p>[a](/accounts/logout/)</p>"),
        ("[a](ftp://b.org)", "<p>[a](ftp://b.org)</p>"),
        ("`<b>`", "<p><code>&lt;b&gt;</code></p>"),
    ],
)
def test_only_markdown_becomes_html(text, html):
    assert render_markdown(text).strip() == html


def test_tags_are_given_at_submission(world, base_catalogue):
    world.worker(catalogue=base_catalogue)
    client = world.login("ben")
    made = post(client, "", spec=tiny_spec(), tags=["baseline", "β"])
    assert (made.status_code, Run.objects.get(pk=made.json()["id"]).tags) == (201, ["baseline", "β"])
    refused = post(client, "", spec=tiny_spec(), tags=["two words"])
    assert (refused.status_code, Run.objects.count()) == (422, 1), "nothing is queued"

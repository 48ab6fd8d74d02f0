"""What attempts were made of: stored with their start, returned newest first, shown on the Config tab as text."""

from __future__ import annotations

MADE_OF = {
    "engine": {"commit": "a" * 40, "dirty": True},
    "user": None,
    "versions": {"python": "3.11.7", "torch": "2.8.0<b>"},
    "models": {"models.actor": "b" * 64},
    "prompts": "c" * 64,
    "command": "oppo train SPEC.yaml --out OUT --root '/data/<b>'",
}


def test_it_is_stored_returned_and_shown_as_text(world, events):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    client = world.login("vic")
    assert client.get(f"/api/v1/runs/{run.pk}/provenance").json() == {"items": [], "next": None}
    assert b"Provenance" not in client.get(f"/runs/{run.pk}/config").content
    assert worker.send_events(attempt_id, [{**events.started(1), "provenance": MADE_OF}]).status_code == 200
    page = {"items": [{"attempt": 1, "provenance": MADE_OF}], "next": None}
    assert client.get(f"/api/v1/runs/{run.pk}/provenance").json() == page
    page = client.get(f"/runs/{run.pk}/config").content.decode()
    assert "2.8.0&lt;b&gt;" in page
    assert f"oppo train run-{run.pk}.yaml --out OUT --root &#x27;/data/&lt;b&gt;&#x27;" in page
    assert "modified" in page


def test_older_engines_tell_none_and_odd_ones_are_refused(world, events):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    odd = {**events.started(1), "provenance": MADE_OF | {"engine": {"commit": "main", "dirty": False}}}
    assert worker.send_events(attempt_id, [odd]).status_code == 422
    assert worker.send_events(attempt_id, [events.started(1)]).status_code == 200
    assert world.login("vic").get(f"/api/v1/runs/{run.pk}/provenance").json() == {"items": [], "next": None}

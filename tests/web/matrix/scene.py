"""Something of everything, with names that paths of the matrix can use."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from oppo_platform.accounts.api_tokens import create_service_token
from oppo_platform.accounts.invites import create_invite, open_invites
from oppo_platform.accounts.passwords import create_password_link
from oppo_platform.accounts.services import create_login_link
from oppo_platform.accounts.team_secrets import set_secret
from oppo_platform.accounts.teams import remove_member, set_member
from oppo_platform.alerts.lifecycle import open_alert
from oppo_platform.alerts.models import Webhook
from oppo_platform.alerts.policy import Condition
from oppo_platform.alerts.webhooks import add_webhook, delete_webhook
from oppo_platform.cluster.models import Node
from oppo_platform.runs import lifecycle
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.labels import change_tags
from oppo_platform.runs.models import Checkpoint, Run
from oppo_platform.runs.pins import pin
from oppo_platform.runs.saved_views import delete_view, save_view
from oppo_platform.storage.trash import delete_run
from oppo_platform.telemetry.models import SampleRow
from tests.web.event_factories import tell_everything

FILES = {"actor/model.safetensors": b"w" * 100, "state.json": b"{}"}


def save(worker: Any, run: Run, attempt_id: int, step: int, files: dict[str, bytes] = FILES) -> int:
    """A checkpoint that is written and registered."""
    url = f"{artifact_url(run.pk)}/checkpoints/step-{step:08d}"
    folder = Path(unquote(urlsplit(url).path))
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest = json.dumps({n: {"sha256": hashlib.sha256(c).hexdigest(), "bytes": len(c)} for n, c in files.items()})
    (folder / "manifest.json").write_text(manifest)
    told = {"epoch": 1, "step": step, "url": url, "manifest_sha256": hashlib.sha256(manifest.encode()).hexdigest(), "bytes": 102}
    assert worker.attempt(attempt_id, "checkpoints", told).status_code == 200
    return Checkpoint.objects.get(run=run, step=step).pk


def set_the_scene(world: Any, events: Any) -> dict[str, Any]:
    """Names in paths → ids: runs in several states that have told something of every kind, and what belongs to them."""
    first, second = world.worker(), world.worker("node2")
    run, attempt_id = world.start(first)
    tell_everything(first, attempt_id, events, steps=3)
    found = {"run": run.pk, "attempt": attempt_id, "checkpoint": save(first, run, attempt_id, 2)}
    found |= {"attempt_token": first.attempt_tokens[attempt_id], "node_token": first.token}
    found["sample"] = SampleRow.objects.first().pk
    found["alert"] = open_alert(run, Condition.KL_ABOVE, "KL to the reference: 63 nats.", 63.0, 50.0).pk
    found["paused"], found["its_checkpoint"], found["other_attempt_token"] = _paused(world, second, "ada")
    found["held"], found["held_at"], _ = _paused(world, second, "ben")
    found["failed"] = _failed(world, second)
    found |= {"waiting": world.submit().pk, "limited": world.submit(queue={"max_runtime_hours": 1}).pk}
    for name in ("ended", "deleted"):
        found[name] = world.submit().pk
        lifecycle.cancel_run(found[name], "user:ada")
    delete_run(found["deleted"], "user:ada")
    pin(run.pk, "user:ada")
    change_tags(run.pk, ["baseline"], [], "user:ada")
    node = Node.objects.get(name="node1")
    found |= {"node": node.pk, "pool": node.pool_id, "device": node.devices.get().pk}
    return found | _of_the_team(world)


def _failed(world: Any, worker: Any) -> int:
    """A run that failed before it had a checkpoint."""
    run = world.submit()
    world.cycle()
    attempt = run.attempts.get()
    assert worker.claim(attempt.pk).status_code == 200
    failed = {"epoch": 1, "outcome": "failed", "reason": "The reward is not finite."}
    assert worker.attempt(attempt.pk, "outcome", failed).status_code == 200
    return run.pk


def _paused(world: Any, worker: Any, user: str) -> tuple[int, int, str]:
    """A run that was paused, its checkpoint, and the token of its attempt."""
    held = world.submit(user)
    world.cycle()
    attempt = held.attempts.get()
    assert worker.claim(attempt.pk).status_code == 200
    assert worker.attempt(attempt.pk, "heartbeat", {"epoch": 1, "running": True}).status_code == 200
    checkpoint = save(worker, held, attempt.pk, 4)
    lifecycle.pause_run(held.pk, "user:ada")
    stopped = {"epoch": 1, "outcome": "paused", "exit_code": 0, "reason": "asked to stop", "last_log_lines": []}
    assert worker.attempt(attempt.pk, "outcome", stopped).status_code == 200
    return held.pk, checkpoint, worker.attempt_tokens[attempt.pk]


def _of_the_team(world: Any) -> dict[str, Any]:
    """What belongs to the team and no run, most of it ada's."""
    ada, team = world.people["ada"], world.team
    views = [save_view(ada, name, {"q": "state:running"}, team)["id"] for name in ("mine", "gone")]
    delete_view(ada, views[1])
    for path in ("gone", "old"):
        add_webhook(ada, team, f"https://example.org/{path}", ["failed"])
    gone_webhook, webhook = Webhook.objects.order_by("pk")
    delete_webhook(ada, team, gone_webhook.pk)
    removed = set_member(ada, team, "eve", "viewer").user
    remove_member(ada, team, removed.pk)
    set_secret(ada, team, "HF_TOKEN", "a secret")
    return {
        "team": team.pk,
        "project": world.project.pk,
        "webhook": webhook.pk,
        "gone_webhook": gone_webhook.pk,
        "removed": removed.pk,
        "view": views[0],
        "gone_view": views[1],
        "token": create_service_token(ada, team, "old", None, "submit").token.pk,
        "invited": _word(create_invite(ada, team, "member", "zoe")),
        "invite": open_invites(team).get().pk,
        "reset": _word(create_password_link(ada, world.people["ben"])),
        "ben": world.people["ben"].pk,
        "login": _word(create_login_link(world.people["ben"])),
    }


def _word(link: str) -> str:
    """What stands at the end of a link."""
    return link.rstrip("/").rsplit("/", 1)[-1]

"""Team secrets: sealed at rest, named in specs, delivered by a claim and by nothing else."""

from __future__ import annotations

import base64
import json
import re
import stat

import pytest
from django.core.exceptions import ImproperlyConfigured
from hypothesis import given
from hypothesis import strategies as st

from oppo_contract import load_spec
from oppo_contract.spec_errors import SpecError
from oppo_platform.accounts import encryption
from oppo_platform.accounts.models import AuditEntry, TeamSecret
from oppo_platform.accounts.services import AccountError
from oppo_platform.accounts.team_secrets import delete_secret, reencrypt_all, set_secret
from oppo_platform.runs.models import Run

VALUE = "hf_abcdefghijklmnop"
USES = {"HF_TOKEN": "secret:hub"}


@pytest.fixture(autouse=True)
def keys(settings, tmp_path):
    """A folder for the keys of each test."""
    settings.OPPO_HOME, settings.OPPO_SECRETS_KEYS = tmp_path, []
    return tmp_path / "secrets_keys"


@pytest.fixture
def hub(world):
    """The team's only secret."""
    set_secret(world.people["ada"], world.team, "hub", VALUE)
    return TeamSecret.objects.get()


def allocated(world, **changes):
    """A run with the secret that waits for its node's claim: (run, worker, attempt id)."""
    worker = world.worker()
    run = world.submit(**{"secrets": USES, **changes})
    world.cycle()
    return run, worker, run.attempts.get().pk


@given(text=st.text(max_size=300), place=st.text(max_size=30))
def test_ciphertext_decrypts_in_its_own_row_only(text, place):
    sealed = encryption.encrypt(text, place)
    assert encryption.decrypt(sealed, place) == text
    assert encryption.encrypt(text, place) != sealed
    with pytest.raises(encryption.DecryptionError):
        encryption.decrypt(sealed, place + "x")


@given(at=st.integers(0, 5 + 12 + len(VALUE) + 15), bit=st.integers(0, 7))
def test_no_bit_can_be_changed(at, bit):
    sealed = bytearray(encryption.encrypt(VALUE, "here"))
    sealed[at] ^= 1 << bit
    with pytest.raises(encryption.DecryptionError):
        encryption.decrypt(bytes(sealed), "here")
    for length in (0, 5, 16, 20, len(sealed) - 1):
        with pytest.raises(encryption.DecryptionError):
            encryption.decrypt(bytes(sealed[:length]), "here")


def test_the_key_lies_in_a_private_file_and_not_in_the_database(hub, keys):
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert VALUE.encode() not in bytes(hub.sealed)
    keys.unlink()
    with pytest.raises(encryption.DecryptionError, match="missing"):
        encryption.decrypt(bytes(hub.sealed), f"team {hub.team_id} secret hub")


def test_keys_change_and_the_one_before_stays_for_a_while(world, hub, keys):
    before = bytes(hub.sealed)
    encryption.add_key()
    assert encryption.decrypt(before, f"team {hub.team_id} secret hub") == VALUE
    assert reencrypt_all() == {"sealed": 1, "lost": []}
    hub.refresh_from_db()
    encryption.add_key()
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert len(keys.read_text().split()) == 2
    assert encryption.decrypt(bytes(hub.sealed), f"team {hub.team_id} secret hub") == VALUE
    with pytest.raises(encryption.DecryptionError):
        encryption.decrypt(before, f"team {hub.team_id} secret hub")
    encryption.add_key()
    assert reencrypt_all() == {"sealed": 0, "lost": ["Letters: hub"]}


def test_keys_from_the_environment(settings, keys):
    settings.OPPO_SECRETS_KEYS = [base64.urlsafe_b64encode(bytes([n]) * 32).decode() for n in (1, 2)]
    sealed = encryption.encrypt(VALUE, "here")
    settings.OPPO_SECRETS_KEYS.reverse()
    assert encryption.decrypt(sealed, "here") == VALUE
    assert not keys.exists()
    with pytest.raises(ImproperlyConfigured, match="put a new one first"):
        encryption.add_key()
    settings.OPPO_SECRETS_KEYS = ["c2hvcnQ="]
    with pytest.raises(ImproperlyConfigured, match="32 bytes"):
        encryption.encrypt(VALUE, "here")


@pytest.mark.parametrize(
    ("secrets", "path"),
    [
        ({"LD_PRELOAD": "secret:hub"}, "secrets"),
        ({"OPPO_REWARD_HOSTS": "secret:hub"}, "secrets"),
        ({"OPPO_SECRET_KEY": "secret:hub"}, "secrets"),
        ({"HF_TOKEN": VALUE}, "secrets.HF_TOKEN"),
        ({"HF_TOKEN": "secret:a b"}, "secrets.HF_TOKEN"),
        ({"HF_TOKEN": 1}, "secrets.HF_TOKEN"),
    ],
)
def test_a_spec_names_secrets_and_never_holds_one(make_spec, secrets, path):
    with pytest.raises(SpecError) as refused:
        load_spec(make_spec(secrets=secrets))
    assert [problem.path for problem in refused.value.problems] == [path]
    assert VALUE not in str(refused.value)
    assert load_spec(make_spec(secrets={"OPPO_REWARD_JUDGE_TOKEN": "secret:judge.1"})).secrets


def test_unknown_names_are_refused_at_submit_with_the_known_ones(world, hub, make_spec):
    world.worker()
    client, body = world.login("ben"), {"spec": make_spec(secrets={"HF_TOKEN": "secret:hubb"})}
    reply = client.post("/api/v1/runs", body, content_type="application/json")
    assert reply.status_code == 422
    problem = reply.json()["errors"][0]
    assert (problem["path"], problem["allowed"], problem["suggestion"]) == ("secrets.HF_TOKEN", "secret:hub", "secret:hub")
    assert client.post("/api/v1/runs/validate", body, content_type="application/json").json()["problems"] == [problem]
    assert client.post("/api/v1/runs", {"spec": make_spec(secrets=USES)}, content_type="application/json").status_code == 201
    asked = {"spec": make_spec(secrets={"HF_TOKEN": "secret:x"}), "project": world.project.pk}
    for who in ("vic", "eve"):  # who may not submit there learns no names
        told = world.login(who).post("/api/v1/runs/validate", asked, content_type="application/json").json()
        paths = [problem["path"] for problem in told["problems"]]
        assert paths == ([] if who == "vic" else ["project"])


def test_a_claim_delivers_and_notes_it(world, hub):
    run, worker, attempt = allocated(world)
    claimed = worker.claim(attempt).json()
    assert claimed["secrets"] == {"HF_TOKEN": VALUE}
    assert "secrets" not in claimed["spec"]
    hub.refresh_from_db()
    assert (hub.last_used_at, hub.last_run) == (world.clock.now(), run)
    assert f">#{run.pk}</span>" in world.login("ada").get(f"/teams/{world.team.pk}/secrets").content.decode()
    entry = AuditEntry.objects.get(action="secret.deliver")
    assert (entry.actor, entry.target, entry.details) == ("node:node1", "hub", {"run": run.pk})
    assert worker.claim(attempt).status_code == 409  # once


def test_another_teams_secret_of_the_same_name_is_not_delivered(world, hub):
    set_secret(world.people["eve"], world.other_team, "hub", "another team's value")
    _, worker, attempt = allocated(world)
    assert worker.claim(attempt).json()["secrets"] == {"HF_TOKEN": VALUE}


@pytest.mark.parametrize("how", ["deleted", "key lost"])
def test_a_run_whose_secret_is_gone_fails_and_says_so(world, hub, keys, how):
    run, worker, attempt = allocated(world)
    if how == "deleted":
        delete_secret(world.people["ada"], world.team, "hub")
    else:
        keys.unlink()
    reply = worker.claim(attempt)
    assert (reply.status_code, reply.json()["reason"]) == (409, "ended")
    run.refresh_from_db()
    assert run.state == "failed"
    assert "secret hub" in run.reason
    assert not run.attempts.get().live
    assert worker.heartbeat()["unclaimed"] == []
    assert not AuditEntry.objects.filter(action="secret.deliver").exists()


def test_the_value_is_on_no_page_in_no_log_and_in_no_fork(world, hub):
    run, worker, attempt = allocated(world)
    worker.claim(attempt)
    client = world.login("ada")
    pages = [f"/teams/{world.team.pk}{end}" for end in ("", "/secrets", "/audit")]
    pages += [f"/runs/{run.pk}{end}" for end in ("", "/config", "/events", "/logs")] + [f"/runs/new?from={run.pk}"]
    for path in pages:
        assert VALUE not in client.get(path).content.decode(), path
    assert "secret:hub" in client.get(f"/runs/{run.pk}/config").content.decode()
    assert VALUE not in json.dumps(Run.objects.get().spec)
    assert VALUE not in str(list(AuditEntry.objects.values()))


@pytest.mark.parametrize(("who", "sees", "changes"), [("vic", 403, 403), ("ben", 200, 403), ("max", 200, 403), ("eve", 404, 404)])
def test_owners_manage_secrets_and_members_see_their_names(world, hub, who, sees, changes):
    client, path = world.login(who), f"/teams/{world.team.pk}/secrets"
    reply = client.get(path)
    assert reply.status_code == sees
    assert (sees == 200) == (">hub<" in reply.content.decode())
    assert client.post(path + "/set", {"name": "hub", "value": "another value"}).status_code == changes
    assert client.post(path + "/hub/delete").status_code == changes
    assert TeamSecret.objects.filter(name="hub").exists()


def test_setting_replacing_deleting(world):
    client, path = world.login("ada"), f"/teams/{world.team.pk}/secrets"
    assert "No secrets yet" in client.get(path).content.decode()
    for _ in range(2):
        assert client.post(path + "/set", {"name": "HF_TOKEN", "value": VALUE}).status_code == 302
    for name, value in (("1x", VALUE), ("", VALUE), ("x", "short"), ("x", "x" * 8193), ("a/b", VALUE)):
        assert client.post(path + "/set", {"name": name, "value": value}).status_code == 422
    assert re.findall(r"secret\.\w+", str(list(AuditEntry.objects.values_list("action", flat=True)))) == [
        "secret.set",
        "secret.replace",
    ]
    assert client.post(path + "/HF_TOKEN/delete").status_code == 302
    assert client.post(path + "/HF_TOKEN/delete").status_code == 404
    with pytest.raises(AccountError, match="8 to"):
        set_secret(world.people["ada"], world.team, "x", "1234567")

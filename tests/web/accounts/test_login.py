"""Getting in: passwords, login links, the first user, the secret key."""

import stat

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import Client

from oppo_platform import environment
from oppo_platform.accounts.models import User
from oppo_platform.accounts.services import AccountError, create_login_link, create_user, find_user
from oppo_platform.projects.models import Project
from oppo_platform.projects.services import ensure_first_user


def link_path(user, **options):
    return create_login_link(user, **options).removeprefix("http://127.0.0.1:8000")


def test_a_login_link_works_once(world):
    path = link_path(world.people["ada"])
    client = Client()
    assert client.get(path).headers["Location"] == "/"
    assert client.get("/api/v1/runs").status_code == 200
    again = Client()
    assert again.get(path).headers["Location"] == "/accounts/login/"
    assert again.get("/api/v1/runs").status_code == 401


def test_of_two_who_use_a_link_at_once_one_gets_in(world, at_once):
    path = link_path(world.people["ada"])
    clients = [Client(), Client()]
    replies = at_once(*[lambda client=client: client.get(path) for client in clients])
    assert sorted(reply.headers["Location"] for reply in replies) == ["/", "/accounts/login/"]


def test_expired_altered_and_foreign_links_do_not_work(world):
    path = link_path(world.people["ada"], hours=1)
    world.clock.advance(3601)
    for bad in (path, link_path(world.people["ada"])[:-1] + "x", "/login-link/nonsense", "/login-link/%00"):
        assert Client().get(bad).headers["Location"] == "/accounts/login/"
    fresh = link_path(world.people["ada"])
    User.objects.filter(username="ada").update(is_active=False)
    assert Client().get(fresh).headers["Location"] == "/accounts/login/"


@pytest.mark.parametrize("name", ["ada", "ada@example.org"])
def test_user_name_and_email_both_log_in(world, name):
    client = Client()
    client.post("/accounts/login/", {"login": name, "password": "wrong"})
    assert client.get("/api/v1/runs").status_code == 401
    client.post("/accounts/login/", {"login": name, "password": "long enough 4 tests"})
    assert client.get("/api/v1/runs").status_code == 200


def test_signup_is_closed(world):
    password = "long enough 4 tests"
    form = {"username": "mallory", "email": "m@example.org", "password1": password, "password2": password}
    Client().post("/accounts/signup/", form)
    assert not User.objects.filter(username="mallory").exists()


def test_the_first_user_is_made_once_with_team_and_project(transactional_db, clock):
    first = ensure_first_user()
    assert first.password is not None
    assert first.user.check_password(first.password)
    assert first.user.memberships.get().role == "owner"
    assert Project.objects.get().team == first.user.teams.get()
    again = ensure_first_user()
    assert (again.user, again.password) == (first.user, None)
    assert find_user(first.user.email) == first.user


def test_names_and_emails_are_unique(world):
    for name, email in (("ADA", "new@example.org"), ("new", "ADA@example.org")):
        with pytest.raises(AccountError):
            create_user(name, email)


def test_the_secret_key_is_made_once_and_kept_private(tmp_path, monkeypatch):
    monkeypatch.delenv("OPPO_SECRET_KEY", raising=False)
    key = environment.secret_key(tmp_path)
    assert environment.secret_key(tmp_path) == key
    assert stat.S_IMODE((tmp_path / "secret_key").stat().st_mode) == 0o600
    (tmp_path / "secret_key").write_text("short")
    with pytest.raises(ImproperlyConfigured):
        environment.secret_key(tmp_path)


def test_database_urls():
    entry = environment.database("postgresql://oppo:p%40ss@db.example:5433/main?sslmode=require")
    assert [entry[key] for key in ("NAME", "USER", "PASSWORD", "HOST", "PORT")] == ["main", "oppo", "p@ss", "db.example", "5433"]
    assert entry["OPTIONS"]["sslmode"] == "require"
    with pytest.raises(ImproperlyConfigured):
        environment.database("nonsense")

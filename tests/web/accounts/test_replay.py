"""A one-time link that was used, replaced or outlived its reason lets nobody in: replays, in order and at once."""

from __future__ import annotations

import re
import threading

import pytest
from django.db import connection, transaction
from django.test import Client

from oppo_platform.accounts.invites import create_invite, join_by_invite
from oppo_platform.accounts.models import Membership, PasswordLink
from oppo_platform.accounts.passwords import create_password_link, find_password_link, set_password_by_link
from oppo_platform.accounts.services import AccountError, create_login_link
from oppo_platform.accounts.teams import remove_member, set_member
from tests.web.locks import wait_for_lock

BASE = "http://127.0.0.1:8000"
PASSWORD, OTHER = "a rather long password", "another long password"


def token_of(link):
    return link.rpartition("/")[2]


@pytest.fixture
def ben_password(world):
    """A password for ben, who logs in by link otherwise."""
    ben = world.people["ben"]
    ben.set_password(PASSWORD)
    ben.save()
    return PASSWORD


@pytest.fixture
def mailed_link(settings, mailoutbox):
    """Ask for ben's reset by mail; the path of the link in the mail."""
    settings.EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
    settings.OPPO_SMTP_URL = "smtp://mail.example.org"

    def ask():
        client = Client()
        assert client.post("/accounts/password/reset/", {"email": "ben@example.org"}).status_code == 302
        return re.search(r"https?://[^/\s]+(/accounts/password/reset/key/\S+)", mailoutbox[-1].body)[1]

    return ask


def reset_by_mail(path, password):
    """Follow the link and set a password; whether the page had a form for it."""
    client = Client()
    form = client.get(path, follow=True)
    if b'name="password1"' not in form.content:
        return False
    client.post(form.redirect_chain[-1][0], {"password1": password, "password2": password})
    return True


def test_a_mailed_reset_link_works_once(world, ben_password, mailed_link):
    ben, session = world.people["ben"], world.login("ben")
    path = mailed_link()
    assert reset_by_mail(path, OTHER)
    ben.refresh_from_db()
    assert ben.check_password(OTHER)
    assert session.get("/runs").status_code == 302  # all sessions have ended
    assert not reset_by_mail(path, PASSWORD)
    ben.refresh_from_db()
    assert ben.check_password(OTHER)


def test_of_two_mailed_links_the_other_ends_with_the_password(world, ben_password, mailed_link):
    first, second = mailed_link(), mailed_link()
    assert reset_by_mail(second, OTHER)
    assert not reset_by_mail(first, PASSWORD)


@pytest.mark.parametrize("change", ["page", "mail", "link"])
def test_a_changed_password_ends_open_links(world, ben_password, mailed_link, change):
    ada, ben = world.people["ada"], world.people["ben"]
    login_link = create_login_link(ben).removeprefix(BASE)
    password_link = create_password_link(ada, ben)
    if change == "page":
        client = world.login("ben")
        form = {"oldpassword": ben_password, "password1": OTHER, "password2": OTHER}
        assert client.post("/accounts/password/change/", form).status_code == 302
    elif change == "mail":
        assert reset_by_mail(mailed_link(), OTHER)
    else:
        set_password_by_link(token_of(password_link), OTHER)
    ben.refresh_from_db()
    assert ben.check_password(OTHER)
    with pytest.raises(AccountError, match="used, was revoked"):
        set_password_by_link(token_of(password_link), PASSWORD)
    client = Client()
    client.post(login_link)
    assert client.get("/runs").status_code == 302


@pytest.mark.parametrize(
    "change", ["joined another team", "creator demoted", "creator inactive", "person inactive", "person removed"]
)
def test_a_password_link_is_void_when_its_creator_may_not_reset_any_more(world, change):
    """Otherwise an owner of one team could keep a link until its person joins another, and enter that."""
    ada, max_, ben = (world.people[name] for name in ("ada", "max", "ben"))
    token = token_of(create_password_link(ada, ben))
    assert find_password_link(token)
    if change == "joined another team":
        Membership.objects.create(team=world.other_team, user=ben, role="viewer")
    elif change == "creator demoted":
        set_member(ada, world.team, "max", "owner")
        set_member(max_, world.team, "ada", "maintainer")
    elif change == "person removed":
        remove_member(ada, world.team, ben.pk)
    else:
        person = ada if change == "creator inactive" else ben
        person.is_active = False
        person.save()
    assert Client().get(f"/password-links/{token}").status_code == 404
    with pytest.raises(AccountError, match="used, was revoked"):
        set_password_by_link(token, PASSWORD)


def test_of_two_links_created_at_once_one_is_valid(world, at_once):
    ada, max_, ben = (world.people[name] for name in ("ada", "max", "ben"))
    set_member(ada, world.team, "max", "owner")
    links = at_once(lambda: create_password_link(ada, ben), lambda: create_password_link(max_, ben))
    assert sum(find_password_link(token_of(link)) is not None for link in links) == 1
    assert PasswordLink.objects.filter(user=ben, revoked_at__isnull=True).count() == 1


def test_of_two_who_use_a_password_link_at_once_one_sets_it(world, at_once):
    ben = world.people["ben"]
    token = token_of(create_password_link(world.people["ada"], ben))
    results = at_once(lambda: set_password_by_link(token, PASSWORD), lambda: set_password_by_link(token, OTHER))
    assert sum(isinstance(result, AccountError) for result in results) == 1
    ben.refresh_from_db()
    assert ben.check_password(PASSWORD if results[0] == ben else OTHER)


def test_joining_another_team_waits_for_a_password_that_is_set_by_link(world):
    """Or the creator of the link, who checks before it, would set a password of a member of the other team."""
    ben = world.people["ben"]
    token = token_of(create_password_link(world.people["ada"], ben))
    invite = token_of(create_invite(world.people["eve"], world.other_team, "member"))
    joiner = threading.Thread(target=lambda: (join_by_invite(invite, ben), connection.close()))
    with transaction.atomic():
        set_password_by_link(token, PASSWORD)
        joiner.start()
        wait_for_lock()
    joiner.join(timeout=30)
    assert Membership.objects.filter(team=world.other_team, user=ben).exists()

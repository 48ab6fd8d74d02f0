"""Users, the teams they belong to, and the two kinds of token that a person can hold."""

from __future__ import annotations

from django.contrib.auth.models import AbstractUser
from django.db import models


class Role(models.TextChoices):
    """What a member may do in a team; each role includes the ones before it."""

    VIEWER = "viewer"
    MEMBER = "member"
    MAINTAINER = "maintainer"
    OWNER = "owner"


class User(AbstractUser):
    """A person who logs in, by user name or email."""

    email = models.EmailField(unique=True)

    # Set by Bearer authentication, never stored: what this request may see is narrowed to the token's team.
    bound_team_id: int | None = None


class Team(models.Model):
    """People who share projects, runs and quota."""

    name = models.CharField(max_length=120, unique=True)
    created_at = models.DateTimeField()
    members = models.ManyToManyField(User, through="Membership", related_name="teams")

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    """A person's role in a team."""

    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.MEMBER)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["team", "user"], name="one_membership_a_team")]


class LoginLink(models.Model):
    """A link that logs one person in once."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="login_links")
    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True)


class ApiToken(models.Model):
    """Lets a program act as a person, within one team."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="api_tokens")
    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="api_tokens")
    name = models.CharField(max_length=120)
    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True)
    last_used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)

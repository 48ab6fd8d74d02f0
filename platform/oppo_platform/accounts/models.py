"""Users, teams, and API tokens."""

from __future__ import annotations

from django.contrib.auth.models import AbstractUser
from django.db import models

from oppo_platform import clock


class Role(models.TextChoices):
    """A member's role in a team; each role includes the previous ones."""

    VIEWER = "viewer"
    MEMBER = "member"
    MAINTAINER = "maintainer"
    OWNER = "owner"


class Scope(models.TextChoices):
    """Scope of an API token; each scope includes the previous ones."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


class User(AbstractUser):
    """A person who logs in, by user name or email; or the account of a service token, which cannot log in."""

    email = models.EmailField(unique=True)
    service_of = models.ForeignKey("Team", null=True, blank=True, on_delete=models.CASCADE, related_name="services")

    # Set by Bearer authentication, never stored: restricts this request to the token's team and scope.
    bound_team_id: int | None = None
    bound_scope: Scope | None = None
    bound_token_id: int | None = None


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
    joined_at = models.DateTimeField(default=clock.now)

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
    """Lets a program act as a person or a service, within one team and scope."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="api_tokens")
    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="api_tokens")
    name = models.CharField(max_length=120)
    scope = models.CharField(max_length=8, choices=Scope.choices, default=Scope.SUBMIT)
    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True)
    last_used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)


class IdempotentReply(models.Model):
    """The stored response of an idempotent write (`api.idempotency`)."""

    token = models.ForeignKey(ApiToken, null=True, on_delete=models.CASCADE, related_name="+")
    user = models.ForeignKey(User, null=True, on_delete=models.CASCADE, related_name="+", help_text="Of a session's request.")
    key = models.CharField(max_length=200)
    digest = models.CharField(max_length=64, help_text="Of method, address and body.")
    created_at = models.DateTimeField(db_index=True)
    status = models.PositiveSmallIntegerField(null=True)
    content_type = models.CharField(max_length=100, blank=True)
    body = models.BinaryField(default=bytes)
    is_secret = models.BooleanField(default=False, help_text="The answer is shown once and was not kept.")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["token", "key"], name="one_reply_a_key"),
            models.UniqueConstraint(fields=["user", "key"], name="one_reply_a_key_of_a_person"),
            models.CheckConstraint(
                condition=models.Q(token=None, user__isnull=False) | models.Q(token__isnull=False, user=None),
                name="a_key_is_a_tokens_or_a_persons",
            ),
        ]


class Invite(models.Model):
    """A link with which one person joins a team, once."""

    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="invites")
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.MEMBER)
    note = models.CharField(max_length=254, blank=True, help_text="Whom it is for: a name or an email address.")
    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    created_by = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)


class PasswordLink(models.Model):
    """A link with which a person sets a new password, once."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="password_links")
    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    created_by = models.ForeignKey(
        User, null=True, on_delete=models.CASCADE, related_name="+", help_text="Empty: from the shell."
    )
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)


class TeamSecret(models.Model):
    """A value for the environment of a team's runs. `sealed` is decrypted at a claim only."""

    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="secrets")
    name = models.CharField(max_length=64)
    sealed = models.BinaryField()
    set_by = models.ForeignKey(User, on_delete=models.PROTECT, related_name="+")
    set_at = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True)
    last_run = models.ForeignKey("runs.Run", null=True, on_delete=models.SET_NULL, related_name="+")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["team", "name"], name="one_secret_a_name")]


class AuditEntry(models.Model):
    """An audit entry. Append-only; a database trigger refuses changes."""

    team = models.ForeignKey(
        Team, null=True, on_delete=models.PROTECT, related_name="audit_entries", help_text="None: it concerns the cluster."
    )
    at = models.DateTimeField()
    actor = models.CharField(max_length=160, help_text="user:ada, node:gpu1, shell")
    action = models.CharField(max_length=40, help_text="What was done, as noun.verb; docs/teams.md lists them.")
    target = models.CharField(max_length=300, help_text="Whom or what it was done to.")
    details = models.JSONField(default=dict, help_text="What changed; never a token or a secret's value.")
    address = models.GenericIPAddressField(null=True, help_text="Where the request came from; empty when it was none.")

    class Meta:
        indexes = [
            models.Index(fields=["team", "-id"], name="audit_by_team"),
            models.Index(fields=["team", "actor", "-id"], name="audit_by_actor"),
            models.Index(fields=["team", "action", "-id"], name="audit_by_action"),
        ]

"""Tables of rules, alerts, mail preferences, webhooks and deliveries. Times come from `oppo_platform.clock`."""

from __future__ import annotations

import uuid

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from oppo_platform.alerts.policy import ANNOUNCEMENTS, Condition
from oppo_platform.alerts.titles import TITLES

CONDITIONS = [(condition.value, condition.value) for condition in Condition]


def chosen_conditions() -> list[str]:
    """Default selection: all conditions. Migrations refer to this function."""
    return [condition.value for condition in Condition]


def conditions_field() -> ArrayField:
    """A column with a selection of conditions."""
    return ArrayField(models.CharField(max_length=20, choices=CONDITIONS), default=chosen_conditions)


class AlertRule(models.Model):
    """A team's rule for a condition. A team without a row has the default (`policy.DEFAULTS`)."""

    team = models.ForeignKey("accounts.Team", on_delete=models.CASCADE, related_name="alert_rules")
    condition = models.CharField(max_length=20, choices=CONDITIONS)
    on = models.BooleanField()
    threshold = models.FloatField(null=True)
    window_steps = models.PositiveIntegerField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["team", "condition"], name="one_rule_a_condition")]


class Watch(models.Model):
    """The evaluator's state of a run that holds devices, between two evaluations."""

    run = models.OneToOneField("runs.Run", primary_key=True, on_delete=models.CASCADE, related_name="watch")
    looks = models.PositiveBigIntegerField(default=0, help_text="Grows with every look that was kept: compare-and-set.")
    epoch = models.PositiveIntegerField(help_text="The newest attempt's, when it was looked at.")
    step = models.PositiveIntegerField()
    silent_since = models.DateTimeField(help_text="When the newest step was first seen, or the attempt began to train.")
    reward = models.JSONField(default=dict, help_text="A `policy.RewardMemory`.")
    reward_step = models.PositiveIntegerField(default=0, help_text="The last step in that memory.")
    reward_epoch = models.PositiveIntegerField(default=0, help_text="The attempt that told it.")


class Ending(models.Model):
    """An end of a run that is not yet announced. Created in the transaction of the end, deleted in that of its alerts."""

    run = models.OneToOneField("runs.Run", primary_key=True, on_delete=models.CASCADE, related_name="+")


class Silence(models.Model):
    """The run opens no alerts while this row exists; `user` silenced it."""

    run = models.OneToOneField("runs.Run", primary_key=True, on_delete=models.CASCADE, related_name="silence")
    user = models.ForeignKey("accounts.User", on_delete=models.CASCADE, related_name="+")
    at = models.DateTimeField()


class Alert(models.Model):
    """A condition held for a run, from `opened_at` to `closed_at`; announcements close when they open."""

    team = models.ForeignKey("accounts.Team", on_delete=models.CASCADE, related_name="alerts", help_text="The run's.")
    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="alerts")
    condition = models.CharField(max_length=20, choices=CONDITIONS)
    why = models.TextField(help_text="A sentence.")
    value = models.FloatField(null=True, help_text="What was measured when it opened, in the threshold's unit.")
    threshold = models.FloatField(null=True, help_text="What the rule allowed then.")
    step = models.PositiveIntegerField(help_text="The run's newest step when it opened.")
    epoch = models.PositiveIntegerField(default=0, help_text="Attempts of the run then. A retried run ends again.")
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)
    closed_why = models.TextField(blank=True)
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL, related_name="+")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "condition"], condition=Q(closed_at=None), name="one_open_alert_a_condition"),
            models.UniqueConstraint(
                fields=["run", "condition", "epoch"],
                condition=Q(condition__in=sorted(c.value for c in ANNOUNCEMENTS)),
                name="one_announcement_an_end",
            ),
        ]
        indexes = [
            models.Index(fields=["team", "-id"], name="alert_by_team"),
            models.Index(fields=["team", "-id"], condition=Q(closed_at=None), name="alert_open_by_team"),
        ]

    @property
    def title(self) -> str:
        """The displayed name of its condition."""
        return TITLES[Condition(self.condition)]


class SeenAlerts(models.Model):
    """The last alert that a user has seen in the list: the bell counts later ones."""

    user = models.OneToOneField("accounts.User", primary_key=True, on_delete=models.CASCADE, related_name="+")
    up_to = models.PositiveBigIntegerField()


class MailChoice(models.Model):
    """A user's mail preferences for a team. Default without a row: every condition of the user's own runs."""

    class Whose(models.TextChoices):
        """Owner of the runs."""

        NONE = "none"
        OWN = "own"
        ALL = "all"

    user = models.ForeignKey("accounts.User", on_delete=models.CASCADE, related_name="+")
    team = models.ForeignKey("accounts.Team", on_delete=models.CASCADE, related_name="+")
    whose = models.CharField(max_length=4, choices=Whose.choices, default=Whose.OWN)
    conditions = conditions_field()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "team"], name="one_mail_choice_a_team")]


class Webhook(models.Model):
    """A team's URL that receives alerts by POST. `sealed` is the encrypted secret that signs every message."""

    class Format(models.TextChoices):
        """Format of the messages: ours, or what a chat service reads."""

        JSON = "json", "JSON, signed"
        SLACK = "slack", "Slack"
        DISCORD = "discord", "Discord"

    team = models.ForeignKey("accounts.Team", on_delete=models.CASCADE, related_name="webhooks")
    url = models.CharField(max_length=2000)
    format = models.CharField(max_length=8, choices=Format.choices, default=Format.JSON)
    sealed = models.BinaryField()
    conditions = conditions_field()
    on = models.BooleanField(default=True)
    created_by = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL, related_name="+")
    created_at = models.DateTimeField()
    deleted_at = models.DateTimeField(null=True, help_text="Null: not deleted.")


class Delivery(models.Model):
    """One message to one receiver. It waits until `due_at`, is claimed, sent outside any transaction, and marked."""

    class State(models.TextChoices):
        """State of the delivery."""

        WAITING = "waiting"
        SENT = "sent"
        FAILED = "failed"

    class About(models.TextChoices):
        """Event that the message reports."""

        OPENED = "opened"
        CLOSED = "closed"
        TEST = "test"

    message_id = models.UUIDField(
        default=uuid.uuid4, unique=True, help_text="The same in every try: readers drop repetitions by it."
    )
    alert = models.ForeignKey(Alert, null=True, on_delete=models.CASCADE, related_name="deliveries", help_text="None: a test.")
    about = models.CharField(max_length=6, choices=About.choices)
    webhook = models.ForeignKey(Webhook, null=True, on_delete=models.CASCADE, related_name="deliveries")
    user = models.ForeignKey("accounts.User", null=True, on_delete=models.CASCADE, related_name="+", help_text="By mail.")
    body = models.TextField(help_text="What is sent: a webhook's JSON, or a mail's text with its subject as the first line.")
    state = models.CharField(max_length=7, choices=State.choices, default=State.WAITING)
    tries = models.PositiveSmallIntegerField(default=0)
    created_at = models.DateTimeField()
    due_at = models.DateTimeField(help_text="Not before; a claim moves it on, so that nobody else takes it meanwhile.")
    done_at = models.DateTimeField(null=True)
    status = models.PositiveSmallIntegerField(null=True, help_text="The last HTTP status.")
    error = models.TextField(blank=True, help_text="Why the last try did not succeed.")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["alert", "about", "webhook"], name="one_delivery_a_webhook"),
            models.UniqueConstraint(fields=["alert", "about", "user"], name="one_delivery_a_person"),
            models.CheckConstraint(condition=Q(webhook=None) ^ Q(user=None), name="one_reader_a_delivery"),
        ]
        indexes = [
            models.Index(fields=["due_at"], condition=Q(state="waiting"), name="delivery_due"),
            models.Index(fields=["webhook", "-id"], name="delivery_by_webhook"),
        ]

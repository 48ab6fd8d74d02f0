"""A run: its spec, attempts, state changes, and checkpoints.

`runs.transitions.move_run` alone changes a run's `state`; the services beside it change an attempt's.
"""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F, Q
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast

from oppo_contract.sections.run import DEFAULT_PRIORITY
from oppo_contract.states import RunState

PRIORITIES = (1, 99)
STATES = [(state.value, state.value) for state in RunState]


def _newest(key: str) -> Cast:
    return Cast(KeyTextTransform(key, "latest"), models.FloatField())


class Run(models.Model):
    """One training run. `spec` is a validated `RunSpec` as JSON and never changes."""

    project = models.ForeignKey("projects.Project", on_delete=models.CASCADE, related_name="runs")
    user = models.ForeignKey("accounts.User", on_delete=models.PROTECT, related_name="runs")
    name = models.CharField(max_length=120)
    spec = models.JSONField()
    spec_version = models.PositiveSmallIntegerField()
    preset = models.CharField(max_length=32)
    devices = models.PositiveIntegerField(help_text="Devices asked for.")
    plan = models.JSONField(null=True, help_text="The plan at submission (`usecases.run_plan`); null for older runs.")
    needs = models.JSONField(help_text="What its nodes must offer, and how many they are: {kind, models, prompts, nodes}.")
    priority = models.PositiveSmallIntegerField(default=DEFAULT_PRIORITY, help_text="1 to 99; higher goes first.")
    preemptible = models.BooleanField(default=True, help_text="Whether it may be asked to make room for others.")
    max_runtime_s = models.FloatField(null=True, help_text="Seconds on devices after which it is paused; may be extended.")

    state = models.CharField(max_length=12, choices=STATES, default=RunState.QUEUED)
    reason = models.TextField(blank=True, help_text="Why it is in this state, a sentence.")
    cursor = models.PositiveBigIntegerField(default=0, help_text="Grows with every visible change, under the row's lock.")
    created_at = models.DateTimeField(help_text="When it was submitted.")
    queued_at = models.DateTimeField(
        help_text="Its place among runs of its priority: kept whatever befalls it, new when resumed."
    )
    not_before = models.DateTimeField(null=True, help_text="Waits until then, after a death.")
    excluded_nodes = models.JSONField(default=list, help_text="Ids of nodes that it is not given any more.")
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    step = models.PositiveIntegerField(default=0)
    total_steps = models.PositiveIntegerField()
    target_reward = models.FloatField(null=True)
    elapsed_s = models.FloatField(default=0.0)
    generated_tokens = models.PositiveBigIntegerField(default=0)
    device_seconds = models.FloatField(default=0.0)
    latest = models.JSONField(default=dict, help_text="The newest value of every metric; null where not finite.")
    # Copies of `latest` values, for sorted lists.
    reward = models.GeneratedField(expression=_newest("critic/score/mean"), output_field=models.FloatField(), db_persist=True)
    kl = models.GeneratedField(expression=_newest("objective/kl"), output_field=models.FloatField(), db_persist=True)
    bubble = models.FloatField(null=True, help_text="Mean idle share of its devices in the newest step, 0 to 1.")
    tags = ArrayField(models.CharField(max_length=40), default=list, help_text="Words that people gave it.")
    notes = models.TextField(default="", blank=True, help_text="What people noted about it, in Markdown.")
    error = models.TextField(blank=True)
    last_log_lines = models.JSONField(default=list)
    begins_with = models.ForeignKey(
        "Checkpoint", null=True, on_delete=models.SET_NULL, related_name="+",
        help_text="What its attempts after `begins_after` begin with until they have saved something: of a fork, another run's.",
    )  # fmt: skip
    begins_after = models.PositiveIntegerField(default=0, help_text="Checkpoints of attempts up to this epoch do not count then.")
    forked_run = models.PositiveBigIntegerField(null=True, help_text="Number of the run that it was forked from, gone or not.")
    forked_step = models.PositiveIntegerField(null=True, help_text="Step of the checkpoint that it began with.")
    retried_after = models.PositiveIntegerField(default=0, help_text="Failures of attempts up to this epoch no longer count.")
    epochs = models.PositiveIntegerField(default=0, help_text="Attempts ever made; the newest attempt's epoch.")
    deleted_at = models.DateTimeField(null=True, help_text="Since then it is in the trash (`storage.trash`) and on no list.")
    archived_at = models.DateTimeField(null=True, help_text="Since then lists show it only when they are asked to.")
    purged_at = models.DateTimeField(null=True, help_text="Since then it is gone for good, and nothing more is taken for it.")

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(priority__range=PRIORITIES), name="priority_1_to_99")]
        indexes = [
            models.Index(fields=["project", "-id"], name="run_by_project"),
            models.Index(fields=["-priority", "queued_at", "id"], condition=Q(state="queued"), name="run_waiting"),
            models.Index(fields=["state", "-id"], name="run_by_state"),
            models.Index(F("reward").desc(nulls_last=True), F("id").desc(), name="run_by_reward"),
        ]

    def __str__(self) -> str:
        return f"{self.id} {self.name}"


class AttemptState(models.TextChoices):
    """Where an attempt is: allocated → claimed → running → ended, or fenced when its lease ran out."""

    ALLOCATED = "allocated"
    CLAIMED = "claimed"
    RUNNING = "running"
    ENDED = "ended"
    FENCED = "fenced"


LIVE_ATTEMPT = (AttemptState.ALLOCATED, AttemptState.CLAIMED, AttemptState.RUNNING)


class Attempt(models.Model):
    """One attempt to run. Its epoch fences leases, states, allocations and checkpoints, not history.

    On several nodes it is also its first node's launch, rank 0, to which the others connect; each of those has a
    `Launch`.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="attempts")
    epoch = models.PositiveIntegerField()
    node = models.ForeignKey("cluster.Node", on_delete=models.PROTECT, related_name="attempts")
    nodes = models.PositiveSmallIntegerField(default=1, help_text="How many nodes it is on.")
    state = models.CharField(max_length=10, choices=AttemptState.choices, default=AttemptState.ALLOCATED)
    token_prefix = models.CharField(max_length=16, blank=True)
    token_digest = models.CharField(max_length=64, blank=True)
    lease_expires_at = models.DateTimeField()
    created_at = models.DateTimeField()
    claimed_at = models.DateTimeField(null=True)
    seen_at = models.DateTimeField(null=True, help_text="Last heartbeat of the supervisor.")
    stop_by = models.DateTimeField(null=True, help_text="Asked to stop: its engine is killed then if it still runs.")
    rendezvous_host = models.CharField(max_length=255, blank=True, help_text="Where its other nodes find the first one.")
    rendezvous_port = models.PositiveIntegerField(null=True)
    rendezvous_by = models.DateTimeField(null=True, help_text="Every node has claimed its launch by then, or it is given up.")
    ended_at = models.DateTimeField(null=True)
    outcome = models.CharField(max_length=16, blank=True)
    exit_code = models.IntegerField(null=True)
    reason = models.TextField(blank=True)
    resume_from = models.ForeignKey("Checkpoint", null=True, on_delete=models.SET_NULL, related_name="+")
    start_step = models.PositiveIntegerField(default=0, help_text="Steps trained before it: 0, or the checkpoint's.")

    # From the engine's `started` event.
    engine_started_at = models.FloatField(null=True, help_text="POSIX seconds; the zero of its spans' times.")
    device_names = models.JSONField(default=list)
    lanes = models.JSONField(default=list)
    provenance = models.JSONField(null=True, help_text="`oppo_contract.events.Provenance`; null before its start.")
    first_step = models.PositiveIntegerField(null=True, help_text="First step it recorded; from here on it hides older attempts.")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "epoch"], name="one_attempt_an_epoch"),
            models.UniqueConstraint(fields=["run"], condition=Q(state__in=LIVE_ATTEMPT), name="one_live_attempt_a_run"),
            models.UniqueConstraint(fields=["token_prefix"], condition=~Q(token_prefix=""), name="one_attempt_a_token"),
        ]
        indexes = [models.Index(fields=["lease_expires_at"], condition=Q(state__in=LIVE_ATTEMPT), name="attempt_leases")]

    def __str__(self) -> str:
        return f"run {self.run_id} attempt {self.epoch}"

    @property
    def live(self) -> bool:
        """Whether it holds its devices and its lease."""
        return self.state in LIVE_ATTEMPT


class LaunchState(models.TextChoices):
    """Where a launch is: allocated → claimed → ended, at the latest with its attempt."""

    ALLOCATED = "allocated"
    CLAIMED = "claimed"
    ENDED = "ended"


class Launch(models.Model):
    """A further node of a multi-node attempt, rank 1 and up, with a token and a lease of its own (`runs.launches`)."""

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="launches")
    node = models.ForeignKey("cluster.Node", on_delete=models.PROTECT, related_name="launches")
    rank = models.PositiveSmallIntegerField()
    state = models.CharField(max_length=10, choices=LaunchState.choices, default=LaunchState.ALLOCATED)
    token_prefix = models.CharField(max_length=16, blank=True)
    token_digest = models.CharField(max_length=64, blank=True)
    lease_expires_at = models.DateTimeField(null=True)
    claimed_at = models.DateTimeField(null=True)
    seen_at = models.DateTimeField(null=True, help_text="Last heartbeat of the supervisor.")
    ended_at = models.DateTimeField(null=True)
    outcome = models.CharField(max_length=16, blank=True, help_text="What its node told; empty when it ended with its attempt.")
    exit_code = models.IntegerField(null=True)
    reason = models.TextField(blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["attempt", "rank"], name="one_launch_a_rank"),
            models.UniqueConstraint(fields=["attempt", "node"], name="one_launch_a_node"),
            models.UniqueConstraint(fields=["token_prefix"], condition=~Q(token_prefix=""), name="one_launch_a_token"),
            models.CheckConstraint(condition=Q(rank__gte=1), name="rank_0_is_the_attempt"),
        ]
        indexes = [models.Index(fields=["node"], condition=~Q(state="ended"), name="launch_live_by_node")]

    def __str__(self) -> str:
        return f"attempt {self.attempt_id} rank {self.rank}"


class Transition(models.Model):
    """A change of a run's state. Append-only."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="transitions")
    old = models.CharField(max_length=12, choices=STATES, blank=True, help_text="Empty at the run's birth.")
    new = models.CharField(max_length=12, choices=STATES)
    reason = models.TextField(blank=True)
    actor = models.CharField(max_length=160, help_text="user:ada, node:gpu1, scheduler")
    at = models.DateTimeField()

    class Meta:
        indexes = [
            models.Index(fields=["run", "id"], name="transition_by_run"),
            models.Index(fields=["run"], condition=Q(new="preempting"), name="transition_preempting"),
        ]


class Change(models.Model):
    """A request about a run without a change of state: a priority, a time limit. Append-only."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="changes")
    what = models.CharField(max_length=40)
    reason = models.TextField()
    actor = models.CharField(max_length=160)
    at = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["run", "id"], name="change_by_run")]


class Checkpoint(models.Model):
    """A registered checkpoint: written by the attempt that held the run."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="checkpoints")
    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="checkpoints")
    step = models.PositiveIntegerField()
    url = models.CharField(max_length=2000)
    manifest_sha256 = models.CharField(max_length=64)
    bytes = models.PositiveBigIntegerField()
    registered_at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["attempt", "step"], name="one_checkpoint_a_step")]
        indexes = [models.Index(fields=["run", "-step"], name="checkpoint_by_run")]


class SavedView(models.Model):
    """A named filter, order and columns of the runs table: its owner's, or a team's."""

    owner = models.ForeignKey("accounts.User", on_delete=models.CASCADE, related_name="saved_views")
    team = models.ForeignKey("accounts.Team", null=True, on_delete=models.CASCADE, related_name="saved_views")
    name = models.CharField(max_length=60)
    query = models.JSONField(help_text="What stands in the table's address: {show, project, q, sort, cols}, each if chosen.")
    created_at = models.DateTimeField()
    deleted_at = models.DateTimeField(null=True, help_text="May be brought back until its owner deletes another one.")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["owner", "name"], condition=Q(team=None, deleted_at=None), name="one_private_view_a_name"
            ),
            models.UniqueConstraint(
                fields=["team", "name"], condition=Q(team__isnull=False, deleted_at=None), name="one_team_view_a_name"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class DefaultView(models.Model):
    """The saved view with which a user's table of runs begins."""

    user = models.OneToOneField("accounts.User", on_delete=models.CASCADE, primary_key=True, related_name="default_view")
    view = models.ForeignKey(SavedView, on_delete=models.CASCADE, related_name="+")


class Allocation(models.Model):
    """A device assigned to an attempt. A partial unique index excludes a second live one."""

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="allocations")
    device = models.ForeignKey("cluster.Device", on_delete=models.PROTECT, related_name="allocations")
    created_at = models.DateTimeField()
    released_at = models.DateTimeField(null=True)
    settled = models.BooleanField(default=False, help_text="Whether `Usage` has it; only ever true after the release.")

    class Meta:
        db_table = "scheduling_allocation"  # before the move to this app
        constraints = [
            models.UniqueConstraint(fields=["device"], condition=Q(released_at__isnull=True), name="one_live_allocation_a_device")
        ]
        indexes = [
            models.Index(fields=["id"], condition=Q(settled=False), name="allocation_unsettled"),
            models.Index(fields=["released_at", "created_at"], name="allocation_by_time"),
        ]

"""Nodes with their devices, join tokens, and catalogues of models and prompts."""

from __future__ import annotations

from django.db import models


class Pool(models.Model):
    """Nodes with the same kind of device, shared by teams through quotas. Created when the first node of a kind reports."""

    name = models.CharField(max_length=120, unique=True)
    created_at = models.DateTimeField()

    def __str__(self) -> str:
        return self.name


class Node(models.Model):
    """A machine whose worker has joined. While `drained_at` is set it gets no new work; its runs continue."""

    name = models.CharField(max_length=120, unique=True)
    hostname = models.CharField(max_length=255)
    cpus = models.PositiveIntegerField()
    memory_bytes = models.PositiveBigIntegerField()
    token_prefix = models.CharField(max_length=16, unique=True)
    token_digest = models.CharField(max_length=64)
    queue = models.CharField(max_length=160, unique=True)
    joined_at = models.DateTimeField()
    last_seen_at = models.DateTimeField(null=True, db_index=True)
    catalogue_at = models.DateTimeField(null=True)
    pool = models.ForeignKey(Pool, null=True, on_delete=models.PROTECT, related_name="nodes")
    drained_at = models.DateTimeField(null=True)
    drain_reason = models.CharField(max_length=300, blank=True)
    clock_skew_s = models.FloatField(null=True, help_text="Its clock minus the platform's at the last heartbeat that had it.")
    wire_version = models.PositiveSmallIntegerField(default=1, help_text="What its worker speaks (`oppo_contract.wire`).")

    def __str__(self) -> str:
        return self.name


class Disk(models.Model):
    """A file system of a node, as its agent reports it. While one is low the node gets no new work."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="disks")
    what = models.CharField(max_length=16, help_text="artifacts, outbox")
    path = models.CharField(max_length=2000)
    free_bytes = models.PositiveBigIntegerField()
    total_bytes = models.PositiveBigIntegerField()
    low = models.BooleanField(default=False)
    told_at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["node", "what"], name="one_disk_a_use")]


class DeviceState(models.TextChoices):
    """Whether a device may be assigned to a run."""

    READY = "ready"
    # A fenced attempt may still use it; its node has not reported it empty.
    UNKNOWN = "unknown"
    # Its node reports a problem: leftover processes, memory errors.
    QUARANTINED = "quarantined"
    # Missing in the node's report.
    GONE = "gone"


class Device(models.Model):
    """A GPU, or the one cpu device of a node without GPUs."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="devices")
    index = models.PositiveIntegerField()
    kind = models.CharField(max_length=8)
    model = models.CharField(max_length=200)
    memory_bytes = models.PositiveBigIntegerField()
    busy_share = models.FloatField(null=True)
    state = models.CharField(max_length=12, choices=DeviceState.choices, default=DeviceState.READY)
    health = models.CharField(max_length=500, blank=True, help_text="What its node says against it.")
    waived = models.CharField(max_length=500, blank=True, help_text="The `health` with which an administrator put it back.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["node", "index"], name="one_device_an_index")]

    def __str__(self) -> str:
        return f"{self.node.name}/{self.kind}:{self.index}"


class JoinToken(models.Model):
    """Lets workers join until it expires or is revoked."""

    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True)


class CatalogueItem(models.Model):
    """What a node's worker can use: a model, a prompt file, a rule, … (`oppo_contract.wire.CatalogueEntry`)."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="catalogue")
    entry_id = models.CharField(max_length=1024)
    kind = models.CharField(max_length=16)
    bytes = models.PositiveBigIntegerField()
    architecture = models.CharField(max_length=200, blank=True)
    task = models.CharField(max_length=32, blank=True)
    tokenizer_digest = models.CharField(max_length=128, blank=True)
    context = models.PositiveIntegerField(default=0)
    vocab = models.PositiveIntegerField(default=0)
    rows = models.PositiveBigIntegerField(default=0)
    weights = models.PositiveBigIntegerField(default=0)
    layers = models.PositiveIntegerField(default=0)
    width = models.PositiveIntegerField(default=0)
    cached = models.PositiveIntegerField(default=0)
    problem = models.CharField(max_length=2000, blank=True, default="")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["node", "kind", "entry_id"], name="one_catalogue_item_an_id")]

"""Projects."""

from __future__ import annotations

from django.db import models


class Project(models.Model):
    """A team's folder of runs."""

    team = models.ForeignKey("accounts.Team", on_delete=models.CASCADE, related_name="projects")
    name = models.CharField(max_length=120)
    created_at = models.DateTimeField()
    pinned = models.ForeignKey(
        "runs.Run",
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="The baseline of its runs, on top of tables.",
    )

    class Meta:
        db_table = "runs_project"  # where it was before
        constraints = [models.UniqueConstraint(fields=["team", "name"], name="one_project_a_name")]

    def __str__(self) -> str:
        return self.name

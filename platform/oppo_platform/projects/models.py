"""Projects, and the charts that their members chose."""

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


class ChartLayout(models.Model):
    """The pinned charts of a project's runs: one user's, or without a user the project's, for members without their own."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="chart_layouts")
    user = models.ForeignKey("accounts.User", null=True, on_delete=models.CASCADE, related_name="+")
    charts = models.JSONField(help_text="In order: {title, keys, log}, each with the names of its metrics.")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "user"], name="one_layout_a_user", nulls_distinct=False),
        ]

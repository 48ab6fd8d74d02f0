"""`Project` comes from the app `runs` (its `0013`). The table stays as it is, with its name."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("accounts", "0005_keys_of_sessions"),
        ("runs", "0012_allocation"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.CreateModel(
                    name="Project",
                    fields=[
                        ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                        ("name", models.CharField(max_length=120)),
                        ("created_at", models.DateTimeField()),
                        (
                            "pinned",
                            models.ForeignKey(
                                help_text="The baseline of its runs, on top of tables.",
                                null=True,
                                on_delete=django.db.models.deletion.SET_NULL,
                                related_name="+",
                                to="runs.run",
                            ),
                        ),
                        (
                            "team",
                            models.ForeignKey(
                                on_delete=django.db.models.deletion.CASCADE, related_name="projects", to="accounts.team"
                            ),
                        ),
                    ],
                    options={
                        "db_table": "runs_project",
                        "constraints": [models.UniqueConstraint(fields=("team", "name"), name="one_project_a_name")],
                    },
                ),
            ],
        ),
    ]

"""`Project` moves to the app `projects`. The table stays as it is, with its name; so do the rows that refer to it."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("projects", "0001_initial"),
        ("runs", "0012_allocation"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AlterField(
                    model_name="run",
                    name="project",
                    field=models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="runs", to="projects.project"
                    ),
                ),
                migrations.DeleteModel(name="Project"),
            ],
        ),
    ]

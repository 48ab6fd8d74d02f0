"""`Allocation` moves to the app `runs` (its `0012`). The table stays as it is, with its name."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("scheduling", "0006_launch_orders")]

    operations = [
        migrations.SeparateDatabaseAndState(state_operations=[migrations.DeleteModel(name="Allocation")]),
    ]

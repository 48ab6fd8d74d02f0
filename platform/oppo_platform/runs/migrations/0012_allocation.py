"""`Allocation` comes from the app `scheduling` (its `0007`). The table stays as it is, with its name."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("cluster", "0004_disks"),
        ("runs", "0011_archived"),
        ("scheduling", "0007_allocation_moves"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.CreateModel(
                    name='Allocation',
                    fields=[
                        ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                        ('created_at', models.DateTimeField()),
                        ('released_at', models.DateTimeField(null=True)),
                        ('settled', models.BooleanField(default=False, help_text='Whether `Usage` has it; only ever true after the release.')),
                        ('attempt', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='allocations', to='runs.attempt')),
                        ('device', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='allocations', to='cluster.device')),
                    ],
                    options={
                        'db_table': 'scheduling_allocation',
                        'indexes': [models.Index(condition=models.Q(('settled', False)), fields=['id'], name='allocation_unsettled'), models.Index(fields=['released_at', 'created_at'], name='allocation_by_time')],
                        'constraints': [models.UniqueConstraint(condition=models.Q(('released_at__isnull', True)), fields=('device',), name='one_live_allocation_a_device')],
                    },
                ),
            ],
        ),
    ]

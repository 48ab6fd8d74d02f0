import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('accounts', '0002_teams'),
        ('cluster', '0003_health'),
        ('runs', '0008_trash'),
    ]

    operations = [
        migrations.CreateModel(
            name='Deletion',
            fields=[
                ('run', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='deletion', serialize=False, to='runs.run')),
                ('at', models.DateTimeField()),
                ('actor', models.CharField(help_text='user:ada, retention', max_length=160)),
                ('due_at', models.DateTimeField(help_text='Until then it can be restored.')),
                ('ended_at', models.DateTimeField(help_text='When its last row of telemetry was gone.', null=True)),
                ('rows', models.PositiveBigIntegerField(default=0, help_text='Rows of telemetry that were deleted.')),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('ended_at__isnull', True)), fields=['due_at'], name='deletion_due')],
            },
        ),
        migrations.CreateModel(
            name='FolderDeletion',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('run_number', models.PositiveBigIntegerField()),
                ('url', models.CharField(max_length=2000)),
                ('bytes', models.PositiveBigIntegerField(default=0, help_text='What it is thought to take.')),
                ('asked_at', models.DateTimeField()),
                ('not_before', models.DateTimeField(help_text='Tried in vain; again then.', null=True)),
                ('error', models.TextField(blank=True, help_text='Why it could not be deleted the last time.')),
                ('node', models.ForeignKey(help_text="None: the platform's machine.", null=True, on_delete=django.db.models.deletion.CASCADE, related_name='folder_deletions', to='cluster.node')),
                ('team', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.team')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('url', 'node'), name='one_deletion_a_folder', nulls_distinct=False)],
            },
        ),
    ]

import django.db.models.deletion
import django.db.models.expressions
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0002_teams'),
        ('runs', '0008_trash'),
        ('storage', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='TeamStorage',
            fields=[
                ('team', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='storage', serialize=False, to='accounts.team')),
                ('used_bytes', models.PositiveBigIntegerField(default=0)),
                ('used_at', models.DateTimeField(null=True)),
                ('quota_bytes', models.PositiveBigIntegerField(help_text='None: no limit.', null=True)),
                ('detail_days', models.PositiveIntegerField(help_text='Timelines, samples and logs of ended runs. None: for ever.', null=True)),
                ('run_days', models.PositiveIntegerField(help_text='Ended runs. None: for ever.', null=True)),
                ('keep_checkpoints', models.PositiveIntegerField(help_text='Newest ones of an ended run. None: all.', null=True)),
            ],
        ),
        migrations.CreateModel(
            name='RunStorage',
            fields=[
                ('run', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='storage', serialize=False, to='runs.run')),
                ('series', models.PositiveBigIntegerField(default=0)),
                ('timeline', models.PositiveBigIntegerField(default=0)),
                ('samples', models.PositiveBigIntegerField(default=0)),
                ('logs', models.PositiveBigIntegerField(default=0)),
                ('checkpoints', models.PositiveBigIntegerField(default=0)),
                ('bytes', models.GeneratedField(db_persist=True, expression=django.db.models.expressions.CombinedExpression(django.db.models.expressions.CombinedExpression(django.db.models.expressions.CombinedExpression(django.db.models.expressions.CombinedExpression(models.F('series'), '+', models.F('timeline')), '+', models.F('samples')), '+', models.F('logs')), '+', models.F('checkpoints')), output_field=models.BigIntegerField())),
                ('measured_at', models.DateTimeField()),
                ('settled', models.BooleanField(default=False, help_text='It has ended, and everything was counted.')),
                ('marks', models.JSONField(default=dict, help_text='Up to which step or line attempts were counted: {part: {id: place}}.')),
                ('detail_deleted_at', models.DateTimeField(help_text='When its timeline, samples and logs were deleted.', null=True)),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('settled', False)), fields=['measured_at'], name='storage_unsettled')],
            },
        ),
    ]

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('storage', '0002_taken'),
    ]

    operations = [
        migrations.AddField(
            model_name='runstorage',
            name='detail_pending',
            field=models.BooleanField(default=False, help_text='Some of them are still there.'),
        ),
        migrations.AddField(
            model_name='teamstorage',
            name='retained_at',
            field=models.DateTimeField(help_text='When they were last applied.', null=True),
        ),
        migrations.AddField(
            model_name='teamstorage',
            name='retention_set_at',
            field=models.DateTimeField(help_text='When the three were last changed.', null=True),
        ),
    ]

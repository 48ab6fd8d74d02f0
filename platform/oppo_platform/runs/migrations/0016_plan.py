from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('runs', '0015_provenance'),
    ]

    operations = [
        migrations.AddField(
            model_name='run',
            name='plan',
            field=models.JSONField(
                help_text='The plan at submission (`usecases.run_plan`); null for older runs.', null=True
            ),
        ),
    ]

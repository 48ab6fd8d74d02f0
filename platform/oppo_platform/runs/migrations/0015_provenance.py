

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('runs', '0014_retries'),
    ]

    operations = [
        migrations.AddField(
            model_name='attempt',
            name='provenance',
            field=models.JSONField(help_text='`oppo_contract.events.Provenance`; null before its start.', null=True),
        ),
    ]



from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('runs', '0013_project_moves'),
    ]

    operations = [
        migrations.AddField(
            model_name='run',
            name='retried_after',
            field=models.PositiveIntegerField(default=0, help_text='Failures of attempts up to this epoch no longer count.'),
        ),
    ]

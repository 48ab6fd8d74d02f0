

from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0005_keys_of_sessions'),
        ('alerts', '0001_initial'),
        ('runs', '0014_retries'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.RemoveConstraint(
            model_name='alert',
            name='one_announcement_a_run',
        ),
        migrations.AddField(
            model_name='alert',
            name='epoch',
            field=models.PositiveIntegerField(default=0, help_text='Attempts of the run then. A retried run ends again.'),
        ),
        migrations.AddConstraint(
            model_name='alert',
            constraint=models.UniqueConstraint(condition=models.Q(('condition__in', ['failed', 'finished'])), fields=('run', 'condition', 'epoch'), name='one_announcement_an_end'),
        ),
    ]

import django.contrib.postgres.fields
import django.db.models.fields.json
import django.db.models.functions.comparison
from django.db import migrations, models


BUBBLES = """
    UPDATE runs_run
    SET bubble = (SELECT avg(value::float8) FROM jsonb_each_text(latest) WHERE starts_with(key, 'bubble/'))
"""


class Migration(migrations.Migration):

    dependencies = [
        ('runs', '0005_preempted'),
    ]

    operations = [
        migrations.AddField(
            model_name='run',
            name='bubble',
            field=models.FloatField(help_text='Mean idle share of its devices in the newest step, 0 to 1.', null=True),
        ),
        migrations.AddField(
            model_name='run',
            name='kl',
            field=models.GeneratedField(db_persist=True, expression=django.db.models.functions.comparison.Cast(django.db.models.fields.json.KeyTextTransform('objective/kl', 'latest'), models.FloatField()), output_field=models.FloatField()),
        ),
        migrations.AddField(
            model_name='run',
            name='reward',
            field=models.GeneratedField(db_persist=True, expression=django.db.models.functions.comparison.Cast(django.db.models.fields.json.KeyTextTransform('critic/score/mean', 'latest'), models.FloatField()), output_field=models.FloatField()),
        ),
        migrations.AddField(
            model_name='run',
            name='tags',
            field=django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=40), default=list, help_text='Words that people gave it.', size=None),
        ),
        migrations.RunSQL(BUBBLES, migrations.RunSQL.noop),
    ]

"""Chat prompts: all turns identify the prompt and are searched.

PostgreSQL cannot change the expression of a generated column, so both columns are made anew.
"""

import django.db.models.fields.json
import django.db.models.functions.comparison
import django.db.models.functions.text
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('telemetry', '0005_spans_from_afar'),
    ]

    operations = [
        migrations.RemoveIndex(model_name='samplerow', name='sample_by_prompt'),
        migrations.RemoveField(model_name='samplerow', name='prompt_key'),
        migrations.RemoveField(model_name='samplerow', name='searched'),
        migrations.AddField(
            model_name='samplerow',
            name='prompt_key',
            field=models.GeneratedField(db_persist=True, expression=django.db.models.functions.text.MD5(django.db.models.functions.comparison.Coalesce(django.db.models.fields.json.KeyTextTransform('messages', 'data'), django.db.models.fields.json.KeyTextTransform('prompt', 'data'))), output_field=models.TextField()),
        ),
        migrations.AddField(
            model_name='samplerow',
            name='searched',
            field=models.GeneratedField(db_persist=True, expression=django.db.models.functions.text.Lower(django.db.models.functions.text.Concat(django.db.models.fields.json.KeyTextTransform('prompt', 'data'), models.Value('\n'), django.db.models.fields.json.KeyTextTransform('response', 'data'), models.Value('\n'), django.db.models.functions.comparison.Cast(models.Func('data', models.Value('$.messages[*].content'), function='jsonb_path_query_array', output_field=models.JSONField()), models.TextField()), output_field=models.TextField())), output_field=models.TextField()),
        ),
        migrations.AddIndex(
            model_name='samplerow',
            index=models.Index(fields=['attempt', 'prompt_key', 'step'], name='sample_by_prompt'),
        ),
    ]

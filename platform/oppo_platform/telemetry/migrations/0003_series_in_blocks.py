import struct

import django.db.models.deletion
from django.db import migrations, models


# Random digits do not compress, and are read in parts.
OUTSIDE_THE_ROW = "ALTER TABLE telemetry_block ALTER COLUMN points SET STORAGE EXTERNAL"
KEEP_METRICS = """
    INSERT INTO telemetry_series (attempt_id, key, points, first_step, last_step)
    SELECT DISTINCT attempt_id, key, 0, 0, 0 FROM telemetry_serieschunk;
    INSERT INTO telemetry_hotpoints (series_id, first_step, last_step, data)
    SELECT s.id, c.first_step, c.last_step, c.steps || c.values
    FROM telemetry_serieschunk c JOIN telemetry_series s USING (attempt_id, key) ORDER BY c.id;
"""
AXES = {"@wall": "elapsed_s", "@tokens": "generated_tokens", "@gpu_seconds": "device_seconds"}


def keep_axes(apps, schema_editor):
    """One row a step becomes one series an axis: int32 steps, then float64 values."""
    model = {name: apps.get_model("telemetry", name) for name in ("StepAxis", "Series", "HotPoints")}
    for attempt_id in model["StepAxis"].objects.order_by().values_list("attempt_id", flat=True).distinct():
        rows = model["StepAxis"].objects.filter(attempt_id=attempt_id).order_by("step").values("step", *AXES.values())
        told = list(rows)
        steps = [row["step"] for row in told]
        for key, field in AXES.items():
            series = model["Series"].objects.create(attempt_id=attempt_id, key=key)
            data = struct.pack(f"<{len(told)}i{len(told)}d", *steps, *(row[field] for row in told))
            model["HotPoints"].objects.create(series=series, first_step=steps[0], last_step=steps[-1], data=data)


class Migration(migrations.Migration):

    dependencies = [
        ('runs', '0004_launches'),
        ('telemetry', '0002_sample_columns'),
    ]

    operations = [
        migrations.AddField(
            model_name='producermark',
            name='sealed',
            field=models.PositiveBigIntegerField(default=0),
        ),
        migrations.CreateModel(
            name='HousekeeperBeat',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('last_round_at', models.DateTimeField()),
            ],
        ),
        migrations.CreateModel(
            name='Series',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('key', models.CharField(max_length=200)),
                ('points', models.PositiveBigIntegerField(default=0)),
                ('first_step', models.PositiveIntegerField(default=0)),
                ('last_step', models.PositiveIntegerField(default=0)),
                ('attempt', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='runs.attempt')),
            ],
        ),
        migrations.CreateModel(
            name='HotPoints',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('first_step', models.PositiveIntegerField()),
                ('last_step', models.PositiveIntegerField()),
                ('data', models.BinaryField()),
                ('series', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='hot', to='telemetry.series')),
            ],
        ),
        migrations.CreateModel(
            name='Block',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('first_step', models.PositiveIntegerField()),
                ('last_step', models.PositiveIntegerField()),
                ('count', models.PositiveIntegerField()),
                ('stride', models.PositiveIntegerField(help_text='Between two steps; 0 where they are not equally far apart.')),
                ('points', models.BinaryField()),
                ('fine', models.BinaryField(help_text='Buckets of 16 points.')),
                ('coarse', models.BinaryField(help_text='Buckets of 256 points.')),
                ('whole', models.BinaryField(help_text='One bucket.')),
                ('series', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='blocks', to='telemetry.series', db_index=False)),
            ],
        ),
        migrations.AddConstraint(
            model_name='series',
            constraint=models.UniqueConstraint(fields=('attempt', 'key'), name='one_series_a_key'),
        ),
        migrations.RunSQL(OUTSIDE_THE_ROW, migrations.RunSQL.noop),
        migrations.RunSQL(KEEP_METRICS),
        migrations.RunPython(keep_axes),
        migrations.DeleteModel(name='SeriesChunk'),
        migrations.DeleteModel(name='StepAxis'),
        migrations.AddConstraint(
            model_name='block',
            constraint=models.UniqueConstraint(fields=('series', 'first_step'), name='one_block_a_first_step'),
        ),
    ]

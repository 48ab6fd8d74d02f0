from django.db import migrations, models

from oppo_platform.telemetry.timeline_downsampling import pack_downsampled


def fill(apps, schema_editor):
    """What was stored before gets its far picture, too; some rows at a time, because they are large."""
    batches = apps.get_model("telemetry", "SpanBatch").objects.order_by("id")
    rows = list(batches[:100])
    while rows:
        for row in rows:
            row.far = pack_downsampled(row.data)
        batches.model.objects.bulk_update(rows, ["far"])
        rows = list(batches.filter(id__gt=rows[-1].id)[:100])


class Migration(migrations.Migration):

    dependencies = [
        ('telemetry', '0004_decision_times'),
    ]

    operations = [
        migrations.AddField(
            model_name='spanbatch',
            name='far',
            field=models.BinaryField(default=b'', help_text='The same from afar (`telemetry.far`).'),
            preserve_default=False,
        ),
        # Random digits do not compress.
        migrations.RunSQL("ALTER TABLE telemetry_spanbatch ALTER COLUMN far SET STORAGE EXTERNAL", migrations.RunSQL.noop),
        migrations.RunPython(fill, migrations.RunPython.noop),
    ]

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('cluster', '0006_wire_version_5'),
    ]

    operations = [
        migrations.AddField(model_name='catalogueitem', name=name, field=models.PositiveIntegerField(default=0))
        for name in ('layers', 'width', 'cached')
    ]

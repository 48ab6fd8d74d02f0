from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('cluster', '0004_disks'),
    ]

    operations = [
        migrations.AddField(
            model_name='catalogueitem',
            name='weights',
            field=models.PositiveBigIntegerField(default=0),
        ),
        migrations.AddField(
            model_name='catalogueitem',
            name='problem',
            field=models.CharField(blank=True, default='', max_length=2000),
        ),
    ]

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('cluster', '0005_catalogue_problems'),
    ]

    operations = [
        migrations.AlterField(
            model_name='catalogueitem',
            name='kind',
            field=models.CharField(max_length=16),
        ),
        migrations.AddField(
            model_name='node',
            name='clock_skew_s',
            field=models.FloatField(
                help_text="Its clock minus the platform's at the last heartbeat that had it.", null=True
            ),
        ),
    ]

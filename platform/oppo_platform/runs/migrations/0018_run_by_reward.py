from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('runs', '0017_notes'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='run',
            index=models.Index(models.OrderBy(models.F('reward'), descending=True, nulls_last=True), models.OrderBy(models.F('id'), descending=True), name='run_by_reward'),
        ),
    ]

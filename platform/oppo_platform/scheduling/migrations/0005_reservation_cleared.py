from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('scheduling', '0004_reasons'),
    ]

    operations = [
        migrations.AddField(
            model_name='reservation',
            name='cleared',
            field=models.BooleanField(default=False, help_text='Others were asked to stop for it: it is the next to start.'),
        ),
    ]

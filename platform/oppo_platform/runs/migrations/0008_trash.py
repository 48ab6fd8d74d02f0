from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('runs', '0007_pinned'),
    ]

    operations = [
        migrations.AddField(
            model_name='run',
            name='deleted_at',
            field=models.DateTimeField(help_text='Since then it is in the trash (`storage.trash`) and on no list.', null=True),
        ),
        migrations.AddField(
            model_name='run',
            name='purged_at',
            field=models.DateTimeField(help_text='Since then it is gone for good, and nothing more is taken for it.', null=True),
        ),
    ]

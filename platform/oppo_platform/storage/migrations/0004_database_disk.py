from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('storage', '0003_retention'),
    ]

    operations = [
        migrations.CreateModel(
            name='DatabaseDisk',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('free_bytes', models.PositiveBigIntegerField(help_text='None: nobody can tell.', null=True)),
                ('low', models.BooleanField(default=False)),
                ('looked_at', models.DateTimeField()),
            ],
        ),
    ]

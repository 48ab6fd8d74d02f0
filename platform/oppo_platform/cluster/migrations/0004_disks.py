import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('cluster', '0003_health'),
    ]

    operations = [
        migrations.CreateModel(
            name='Disk',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('what', models.CharField(help_text='artifacts, outbox', max_length=16)),
                ('path', models.CharField(max_length=2000)),
                ('free_bytes', models.PositiveBigIntegerField()),
                ('total_bytes', models.PositiveBigIntegerField()),
                ('low', models.BooleanField(default=False)),
                ('told_at', models.DateTimeField()),
                ('node', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='disks', to='cluster.node')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('node', 'what'), name='one_disk_a_use')],
            },
        ),
    ]

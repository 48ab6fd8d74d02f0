import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('runs', '0004_launches'),
        ('scheduling', '0005_reservation_cleared'),
    ]

    operations = [
        migrations.AddField(
            model_name='dispatch',
            name='launch',
            field=models.OneToOneField(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='dispatch', to='runs.launch'),
        ),
        migrations.AlterField(
            model_name='dispatch',
            name='attempt',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='dispatches', to='runs.attempt'),
        ),
        migrations.AddConstraint(
            model_name='dispatch',
            constraint=models.UniqueConstraint(fields=('attempt', 'queue'), name='one_order_a_node'),
        ),
    ]

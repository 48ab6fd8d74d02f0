from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("alerts", "0004_webhook_format"),
    ]

    operations = [
        migrations.AddField(
            model_name="webhook",
            name="deleted_at",
            field=models.DateTimeField(help_text="Null: not deleted.", null=True),
        ),
    ]

import oppo_platform.clock
from django.db import migrations, models
from django.db.models import F, OuterRef, Subquery
from django.db.models.functions import Greatest


def since_person_and_team_exist(apps, schema_editor):
    """Members of before joined when both they and their team existed, as far as is known."""
    Membership = apps.get_model("accounts", "Membership")
    known = Membership.objects.filter(pk=OuterRef("pk")).annotate(at=Greatest(F("user__date_joined"), F("team__created_at")))
    Membership.objects.update(joined_at=Subquery(known.values("at")[:1]))


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0005_keys_of_sessions'),
    ]

    operations = [
        migrations.AddField(
            model_name='membership',
            name='joined_at',
            field=models.DateTimeField(default=oppo_platform.clock.now),
        ),
        migrations.RunPython(since_person_and_team_exist, migrations.RunPython.noop, elidable=True),
    ]

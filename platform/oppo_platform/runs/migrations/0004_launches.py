"""An attempt on several nodes: a launch for each further one, which the database lets nobody write to once the attempt has ended."""

import django.db.models.deletion
from django.db import migrations, models


LAUNCH = """
CREATE FUNCTION oppo_fence_launch() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    attempt runs_attempt%ROWTYPE;
BEGIN
    SELECT * INTO attempt FROM runs_attempt WHERE id = NEW.attempt_id;
    IF TG_OP = 'INSERT' THEN
        IF attempt.state = 'allocated' AND NEW.state = 'allocated' AND NEW.rank < attempt.nodes AND NEW.node_id <> attempt.node_id
        THEN
            RETURN NEW;
        END IF;
    ELSIF (NEW.attempt_id, NEW.node_id, NEW.rank) IS NOT DISTINCT FROM (OLD.attempt_id, OLD.node_id, OLD.rank)
    AND (OLD.state <> 'ended' OR NEW IS NOT DISTINCT FROM OLD)
    AND (NEW.state = 'ended' OR attempt.state IN ('claimed', 'running'))
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'rank % of attempt % (epoch %, %) is %', NEW.rank, attempt.id, attempt.epoch, attempt.state, NEW.state
        USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'stale_epoch';
END $$;
CREATE TRIGGER oppo_fence_launch BEFORE INSERT OR UPDATE ON runs_launch FOR EACH ROW EXECUTE FUNCTION oppo_fence_launch();
"""
UNDO = "DROP TRIGGER oppo_fence_launch ON runs_launch; DROP FUNCTION oppo_fence_launch();"


class Migration(migrations.Migration):

    dependencies = [
        ('cluster', '0003_health'),
        ('runs', '0003_fencing'),
    ]

    operations = [
        migrations.AddField(
            model_name='attempt',
            name='nodes',
            field=models.PositiveSmallIntegerField(default=1, help_text='How many nodes it is on.'),
        ),
        migrations.AddField(
            model_name='attempt',
            name='rendezvous_by',
            field=models.DateTimeField(help_text='Every node has claimed its launch by then, or it is given up.', null=True),
        ),
        migrations.AddField(
            model_name='attempt',
            name='rendezvous_host',
            field=models.CharField(blank=True, help_text='Where its other nodes find the first one.', max_length=255),
        ),
        migrations.AddField(
            model_name='attempt',
            name='rendezvous_port',
            field=models.PositiveIntegerField(null=True),
        ),
        migrations.AlterField(
            model_name='run',
            name='needs',
            field=models.JSONField(help_text='What its nodes must offer, and how many they are: {kind, models, prompts, nodes}.'),
        ),
        migrations.CreateModel(
            name='Launch',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('rank', models.PositiveSmallIntegerField()),
                ('state', models.CharField(choices=[('allocated', 'Allocated'), ('claimed', 'Claimed'), ('ended', 'Ended')], default='allocated', max_length=10)),
                ('token_prefix', models.CharField(blank=True, max_length=16)),
                ('token_digest', models.CharField(blank=True, max_length=64)),
                ('lease_expires_at', models.DateTimeField(null=True)),
                ('claimed_at', models.DateTimeField(null=True)),
                ('seen_at', models.DateTimeField(help_text='Last heartbeat of the supervisor.', null=True)),
                ('ended_at', models.DateTimeField(null=True)),
                ('outcome', models.CharField(blank=True, help_text='What its node told; empty when it ended with its attempt.', max_length=16)),
                ('exit_code', models.IntegerField(null=True)),
                ('reason', models.TextField(blank=True)),
                ('attempt', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='launches', to='runs.attempt')),
                ('node', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='launches', to='cluster.node')),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('state', 'ended'), _negated=True), fields=['node'], name='launch_live_by_node')],
                'constraints': [models.UniqueConstraint(fields=('attempt', 'rank'), name='one_launch_a_rank'), models.UniqueConstraint(fields=('attempt', 'node'), name='one_launch_a_node'), models.UniqueConstraint(condition=models.Q(('token_prefix', ''), _negated=True), fields=('token_prefix',), name='one_launch_a_token'), models.CheckConstraint(condition=models.Q(('rank__gte', 1)), name='rank_0_is_the_attempt')],
            },
        ),
        migrations.RunSQL(LAUNCH, UNDO),
    ]

"""What has ended, or was taken over by a newer epoch, cannot be written to: the database refuses it, whoever asks.

The services check first, to answer with a reason; these triggers are what is relied on. Telemetry of a fenced attempt (its start,
its first step) stays writable, because an epoch fences leases, states, allocations and checkpoints, not history.
"""

from django.db import migrations

ATTEMPT = """
CREATE FUNCTION oppo_fence_attempt() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.run_id, NEW.epoch, NEW.node_id) IS DISTINCT FROM (OLD.run_id, OLD.epoch, OLD.node_id)
    OR (OLD.state IN ('ended', 'fenced') AND
        (NEW.state, NEW.outcome, NEW.reason, NEW.ended_at, NEW.claimed_at, NEW.seen_at, NEW.lease_expires_at, NEW.stop_by,
         NEW.token_digest, NEW.exit_code)
        IS DISTINCT FROM
        (OLD.state, OLD.outcome, OLD.reason, OLD.ended_at, OLD.claimed_at, OLD.seen_at, OLD.lease_expires_at, OLD.stop_by,
         OLD.token_digest, OLD.exit_code))
    THEN
        RAISE EXCEPTION 'attempt % (epoch %) is %', OLD.id, OLD.epoch, OLD.state
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'stale_epoch';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER oppo_fence_attempt BEFORE UPDATE ON runs_attempt FOR EACH ROW EXECUTE FUNCTION oppo_fence_attempt();
"""
CHECKPOINT = """
CREATE FUNCTION oppo_fence_checkpoint() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    attempt runs_attempt%ROWTYPE;
    run runs_run%ROWTYPE;
BEGIN
    SELECT * INTO attempt FROM runs_attempt WHERE id = NEW.attempt_id;
    SELECT * INTO run FROM runs_run WHERE id = attempt.run_id;
    IF NEW.run_id <> attempt.run_id OR attempt.epoch <> run.epochs OR attempt.state = 'ended'
    OR (attempt.state = 'fenced' AND run.state NOT IN ('queued', 'paused'))
    THEN
        RAISE EXCEPTION 'attempt % (epoch % of %) is % and registers no checkpoint', attempt.id, attempt.epoch, run.epochs, attempt.state
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'stale_epoch';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER oppo_fence_checkpoint BEFORE INSERT OR UPDATE ON runs_checkpoint
    FOR EACH ROW EXECUTE FUNCTION oppo_fence_checkpoint();
"""
TRANSITION = """
CREATE FUNCTION oppo_keep_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rows of % are only ever added', TG_TABLE_NAME USING ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER oppo_keep_transitions BEFORE UPDATE ON runs_transition FOR EACH ROW EXECUTE FUNCTION oppo_keep_history();
CREATE TRIGGER oppo_keep_changes BEFORE UPDATE ON runs_change FOR EACH ROW EXECUTE FUNCTION oppo_keep_history();
"""
UNDO = """
DROP TRIGGER oppo_keep_changes ON runs_change;
DROP TRIGGER oppo_keep_transitions ON runs_transition;
DROP FUNCTION oppo_keep_history();
DROP TRIGGER oppo_fence_checkpoint ON runs_checkpoint;
DROP FUNCTION oppo_fence_checkpoint();
DROP TRIGGER oppo_fence_attempt ON runs_attempt;
DROP FUNCTION oppo_fence_attempt();
"""


class Migration(migrations.Migration):

    dependencies = [("runs", "0002_steering")]

    operations = [migrations.RunSQL(ATTEMPT + CHECKPOINT + TRANSITION, UNDO)]

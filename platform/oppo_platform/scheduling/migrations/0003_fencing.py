"""Devices are given to the newest attempt of a run only, before it is claimed, and are given back once."""

from django.db import migrations

ALLOCATION = """
CREATE FUNCTION oppo_fence_allocation() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    attempt runs_attempt%ROWTYPE;
    newest integer;
BEGIN
    IF TG_OP = 'INSERT' THEN
        SELECT * INTO attempt FROM runs_attempt WHERE id = NEW.attempt_id;
        SELECT epochs INTO newest FROM runs_run WHERE id = attempt.run_id;
        IF attempt.epoch = newest AND attempt.state = 'allocated' THEN
            RETURN NEW;
        END IF;
    ELSIF (NEW.attempt_id, NEW.device_id) IS NOT DISTINCT FROM (OLD.attempt_id, OLD.device_id)
    AND (OLD.released_at IS NULL OR NEW.released_at IS NOT DISTINCT FROM OLD.released_at) THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'device % cannot be given to, or taken from, attempt % any more', NEW.device_id, NEW.attempt_id
        USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'stale_epoch';
END $$;
CREATE TRIGGER oppo_fence_allocation BEFORE INSERT OR UPDATE ON scheduling_allocation
    FOR EACH ROW EXECUTE FUNCTION oppo_fence_allocation();
"""
UNDO = "DROP TRIGGER oppo_fence_allocation ON scheduling_allocation; DROP FUNCTION oppo_fence_allocation();"


class Migration(migrations.Migration):

    dependencies = [("runs", "0002_steering"), ("scheduling", "0002_shares")]

    operations = [migrations.RunSQL(ALLOCATION, UNDO)]

"""The columns of the runs table and the pinned baseline that they are measured against."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_platform.pages.templatetags.oppo_format import figure, fixed, signed
from oppo_platform.runs.columns import COLUMNS, DEFAULT_COLUMNS, MOST_COLUMNS, difference, format_columns, parse_columns, value
from oppo_platform.runs.filtering import FilterError
from oppo_platform.runs.models import Run
from oppo_platform.runs.selectors import existing_runs, run_summary

KEYS = st.one_of(
    st.sampled_from([*COLUMNS, "actor/entropy", "bubble/cpu:0", "overlap_factor", "ppo.batch_size", "models.actor.path", "seed"])
)


@given(keys=st.lists(KEYS, max_size=MOST_COLUMNS))
def test_a_choice_is_read_as_it_was_written(keys):
    columns = parse_columns(",".join(keys))
    assert [column.key for column in columns] == (list(dict.fromkeys(keys)) or list(DEFAULT_COLUMNS))
    assert parse_columns(format_columns(columns)) == columns


@given(own=st.floats(), reference=st.floats())
def test_a_difference_leads_from_the_baseline_to_the_run(own, reference):
    more = difference(own, reference)
    assert more is None or reference + more == pytest.approx(own, rel=1e-6, abs=1e-6 * max(1.0, abs(reference)))


@pytest.mark.parametrize(
    ("cols", "message"),
    [("rewrd", "Did you mean “reward”?"), ("a b/c", "no column"), (",".join(f"a/{i}" for i in range(31)), "at most 30"),
     ("x" * 2001, "at most 2000"), ("a\0", "at most"), ("<b>", "no column"), ("ppo.Batch", "no column")],
)  # fmt: skip
def test_a_choice_that_makes_no_sense_says_what_would(world, cols, message):
    with pytest.raises(FilterError) as error:
        parse_columns(cols)
    assert message in error.value.message
    world.submit()
    page = world.login("ada").get("/runs", {"cols": cols})
    assert page.status_code == 200
    assert message in page.content.decode()
    assert 'data-col="reward"' in page.content.decode(), "the usual columns stand there"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (1.234, "1.23"), (-0.0123, "−0.0123"), (1234.5, "1,234"), (3e-6, "3.0e-6"), (-2.5e7, "−2.5e7"),
     (0.0099999998, "0.0100"), (9.999, "10.0"), (-99.96, "−100"), (999.9, "1,000"), (999_999.9, "1.0e6")],
)  # fmt: skip
def test_figures_have_three_digits_that_matter(number, text):
    assert figure(number) == text


def test_differences_have_a_sign_or_are_left_out():
    assert (signed(0.123, fixed), signed(-0.123, fixed), signed(0.001, fixed)) == ("+0.12", "−0.12", "")


def test_any_metric_and_setting_is_a_column_and_sorts(world):
    few, many = world.submit(name="few", ppo={"batch_size": 8}), world.submit(name="many", ppo={"batch_size": 32})
    Run.objects.filter(pk=few.pk).update(latest={"actor/entropy": 0.25, "overlap_factor": 1.5})
    shown = world.login("vic").get("/runs", {"cols": "actor/entropy,ppo.batch_size,overlap_factor", "sort": "-ppo.batch_size"})
    text = re.sub(r">\s+", ">", re.sub(r"\s+<", "<", shown.content.decode()))
    assert text.index(">many<") < text.index(">few<")
    for cell in (">0.250<", ">8<", ">32<", ">1.50<"):
        assert cell in text
    assert 'href="?sort=-actor/entropy&amp;cols=actor/entropy,ppo.batch_size,overlap_factor"' in text
    assert {item["id"] for item in world.login("vic").get("/api/v1/runs?filter=overlap_factor>1").json()["items"]} == {few.pk}
    told = world.login("vic").get("/api/v1/runs/words").json()
    assert "ppo.batch_size" in told["settings"]
    assert [column["name"] for column in told["columns"]] == list(COLUMNS)
    summary = run_summary(existing_runs(world.people["vic"], [many.pk])[0])
    assert [value(column, summary, many.spec) for column in parse_columns("ppo.batch_size,models.actor,id,actor/entropy")] == [
        32,
        "…",
        many.pk,
        None,
    ]


def test_a_list_reads_specs_only_for_settings(world, django_assert_num_queries):
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    world.submit()
    client = world.login("ada")
    with CaptureQueriesContext(
        connection,
    ) as plain:
        client.get("/runs", {"part": "rows", "cols": "reward,actor/entropy"})
    assert not any('"runs_run"."spec"' in query["sql"] for query in plain)
    with CaptureQueriesContext(connection) as settings:
        client.get("/runs", {"part": "rows", "cols": "reward,ppo.batch_size"})
    assert len(settings) == len(plain) + 1
    assert not any("telemetry_" in query["sql"] for query in [*plain, *settings])


def test_the_baseline_is_on_top_and_the_others_show_their_difference(world):
    runs = [world.submit(name=f"run {i}", ppo={"batch_size": 8 * (i + 1)}) for i in range(3)]
    for i, run in enumerate(runs):
        Run.objects.filter(pk=run.pk).update(latest={"critic/score/mean": 1.0 + i / 4}, bubble=0.5 - i / 10)
    ben = world.login("ben")
    assert ben.post(f"/api/v1/runs/{runs[0].pk}/pin").status_code == 200
    text = ben.get("/runs", {"q": "name:2", "cols": "reward,bubble,ppo.batch_size"}).content.decode()
    assert text.index(">run 0<") < text.index(">run 2<")
    assert ">run 1<" not in text
    for delta in (">+0.50<", ">−20.0 %<", ">+16<"):
        assert delta in text
    assert text.count("data-pinned") == 1
    assert ben.get("/runs", {"q": "name:none"}).content.decode().count("none-match") == 1
    compared = ben.get("/api/v1/compare", {"runs": f"{runs[2].pk},{runs[0].pk}"}).json()
    assert compared["baseline"] == runs[0].pk
    assert [item["id"] for item in ben.get("/api/v1/runs/pinned").json()["items"]] == [runs[0].pk]
    assert world.login("eve").get("/api/v1/runs/pinned").json()["items"] == []
    ben.post(f"/api/v1/runs/{runs[1].pk}/unpin")  # is not it
    ben.post(f"/api/v1/runs/{runs[1].pk}/pin")
    world.project.refresh_from_db()
    assert world.project.pinned_id == runs[1].pk
    ben.post(f"/api/v1/runs/{runs[1].pk}/unpin")
    assert "data-pinned" not in ben.get("/runs").content.decode()


def test_permission_to_pin(world):
    run = world.submit()
    for deed in ("pin", "unpin"):
        assert world.login("vic").post(f"/api/v1/runs/{run.pk}/{deed}").status_code == 403
        assert world.login("eve").post(f"/api/v1/runs/{run.pk}/{deed}").status_code == 404


def test_a_deleted_baseline_leaves_none_and_two_that_pin_at_once_leave_one(world, at_once):
    from oppo_platform.runs.pins import pin

    runs = [world.submit(name=f"run {i}") for i in range(3)]
    assert at_once(*(lambda pk=run.pk: pin(pk, "user:ada") for run in runs)) == [None] * 3
    world.project.refresh_from_db()
    assert world.project.pinned_id in {run.pk for run in runs}
    Run.objects.filter(pk=world.project.pinned_id).delete()
    world.project.refresh_from_db()
    assert world.project.pinned_id is None

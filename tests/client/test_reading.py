"""What a trained run tells a notebook: metrics, answers, log, events, timeline, comparison."""

from __future__ import annotations

import math
import sys

import plotly.graph_objects
import pytest

from oppo_cli.simulate_events import download_recording
from oppo_client import MissingPackage, Refused, Table, UnknownMetric
from oppo_contract.events import parse_event
from oppo_contract.spec import load_spec
from oppo_core.simulation.assemble import assemble, steps_of
from oppo_core.simulation.recording import read_recording
from tests.simulation.test_recorded import cpu_devices, write_recording

REWARD = "critic/score/mean"


@pytest.fixture
def trained(client, two_runs):
    """(sequential, oppo), both trained for 60 steps."""
    return [client.get(run_id) for run_id in two_runs]


def test_metrics_are_columns_of_every_point(client, trained):
    run = trained[1]
    table = run.metrics([REWARD, "bubble/*"], x="wall_time", frame=False)
    assert isinstance(table, Table)
    assert list(table) == ["step", "wall_time", REWARD, "bubble/cpu:0", "bubble/cpu:1"]
    assert table["step"] == list(range(1, 61))
    assert all(earlier < later for earlier, later in zip(table["wall_time"], table["wall_time"][1:], strict=False))
    assert table[REWARD][-1] == run.latest[REWARD]
    assert run.metrics(REWARD, frame=False).keys() == {"step", REWARD}
    assert len(table.rows) == 60
    assert repr(table).splitlines()[0].split() == list(table)
    assert "<table>" in table._repr_html_()


def test_longer_series_come_window_by_window(trained, monkeypatch):
    from oppo_client import series

    whole = trained[1].metrics([REWARD, "oppo/overcommit"], frame=False)
    monkeypatch.setattr(series, "WINDOW", 13)
    assert trained[1].metrics([REWARD, "oppo/overcommit"], frame=False) == whole


def test_thinned_series_have_their_extremes(trained):
    whole = trained[1].metrics(REWARD, frame=False)
    thin = trained[1].metrics(REWARD, max_points=8, frame=False)
    assert list(thin) == ["step", REWARD, f"{REWARD} low", f"{REWARD} high"]
    assert len(thin["step"]) <= 8
    assert math.isclose(max(thin[f"{REWARD} high"]), max(whole[REWARD]), rel_tol=1e-4)


def test_series_of_different_steps_share_a_table():
    from oppo_client.series import join_series

    parts = {"a": {"step": [1, 2], "x": [1.0, 2.0], "y": [5.0, None]}, "b": {"step": [2, 3], "x": [2.0, None], "y": [6.0, 7.0]}}
    table = join_series(parts, "tokens")
    assert table["step"] == [1, 2, 3]
    assert [math.isnan(v) for v in table["a"]] == [False, True, True]
    assert [math.isnan(v) for v in table["b"]] == [True, False, False]
    assert math.isnan(table["tokens"][2])


def test_unknown_metrics_and_axes_are_named(client, live, trained, spec):
    with pytest.raises(UnknownMetric, match="Did you mean critic/score/mean"):
        trained[1].metrics("critic/score/men")
    with pytest.raises(UnknownMetric, match="nothing/"):
        trained[1].metrics(["nothing/*"])
    with pytest.raises(UnknownMetric, match="no metrics yet"):
        client.submit(spec()).metrics(REWARD)
    with pytest.raises(ValueError, match="wall_time"):
        trained[1].metrics(REWARD, x="walltime")


def test_answers_page_by_page(trained, monkeypatch):
    from oppo_client import pagination

    monkeypatch.setattr(pagination, "PAGE", 7)
    found = list(trained[1].samples(sort="step"))
    assert [sample.step for sample in found] == list(range(1, 61))
    (one,) = trained[1].samples(step=30)
    assert one == found[29]
    assert one.response.endswith("onerror=window.pwned=1>")
    assert "<script>" not in one._repr_html_()
    assert "<img" not in one._repr_html_()
    assert {sample.step % 2 for sample in trained[1].samples(q="harbour")} == {0}
    deferred = next(trained[1].samples(min_age=1))
    assert "staleness" in deferred._repr_html_()
    with pytest.raises(TypeError, match="min_score"):
        trained[1].samples(minscore=3)
    with pytest.raises(Refused):
        list(trained[1].samples(sort="beauty"))


def test_samples_side_by_side(client, trained, monkeypatch):
    from oppo_client import pagination

    monkeypatch.setattr(pagination, "PAGE", 1)
    prompts = list(client.compare_samples(trained, held_out=False, sort="prompt"))
    assert [[sample.raw["run"] for sample in samples] for samples in prompts] == [[run.id for run in trained]] * 2
    assert {len({sample.prompt for sample in samples}) for samples in prompts} == {1}
    assert {sample.step for samples in prompts for sample in samples} == {59, 60}
    (harbour,) = client.compare_samples([trained[1].id], [10, 20, "latest"], held_out=False, q="harbour")
    assert [sample.step for sample in harbour] == [10, 20, 60]
    assert list(client.compare_samples(trained, steps=["latest"])) == [], "nothing is held out"
    assert len(list(trained[1].samples(min_length=1, max_length=512))) == 60
    with pytest.raises(TypeError, match="min_length"):
        client.compare_samples(trained, min_age=3)


def test_the_log_backwards_and_whole(trained, monkeypatch):
    from oppo_client import pagination

    monkeypatch.setattr(pagination, "LINES_A_CALL", 9)
    whole = list(trained[1].logs(tail=None))
    assert whole[0].text == "loading the actor"
    assert len(whole) == 62
    assert [line.id for line in whole] == sorted({line.id for line in whole})
    assert list(trained[1].logs(tail=20)) == whole[-20:]
    assert list(trained[1].logs(tail=0)) == []
    assert list(trained[1].logs(follow=True, tail=5)) == whole[-5:]  # it has ended
    assert [str(line) for line in trained[1].logs(q="no GPU", tail=None)] == ["warning: no GPU, training on 2 cores"]
    with pytest.raises(ValueError, match="supervisor"):
        trained[1].logs(stream="stdin")


def test_the_timeline_is_the_platforms_figure(trained):
    line = trained[1].timeline(steps=range(10, 12))
    assert line.steps == [10, 11]
    figure = line.figure()
    assert isinstance(figure, plotly.graph_objects.Figure)
    assert len(figure.data) > 0
    assert {"device", "cause", "words"} <= line.worst.keys()
    assert "steps 10 to 11" in repr(line)
    assert "<table>" in line._repr_html_()
    assert trained[1].timeline().steps[-1] == 60
    with pytest.raises(ValueError, match="empty"):
        trained[1].timeline(steps=range(3, 3))
    assert '"traceEvents"' in trained[1].trace(range(10, 12))


def test_plots(trained):
    figure = trained[1].plot([REWARD, "objective/kl"], x="tokens")
    assert [trace.name for trace in figure.data] == [REWARD, "objective/kl"]
    assert len(figure.data[0].x) == 60
    assert len(trained[1].plot(max_points=8).data) == 3  # a curve and its band


def test_a_comparison_is_a_row_a_run(client, trained):
    told = client.compare(trained[::-1], target_reward=1.0, baseline=trained[0])
    table = told.table(frame=False)
    assert table["run"] == [trained[1].id, trained[0].id]
    assert told.baseline == trained[0].id
    assert table["speedup"][1] == 1
    assert table["speedup"][0] > 1
    assert table["overlap.intra_step"] == ["per_chunk", "off"]
    assert len(told.metrics(trained[0].id, frame=False)["step"]) == 60
    assert [trace.name for trace in told.plot().data] == [f"{run.id} {run.name}" for run in trained[::-1]]
    assert "target reward 1" in told._repr_html_()
    assert "2 runs" in repr(told)


def test_groups_of_a_comparison_have_their_speed_up(client, trained):
    told = client.compare(trained, target_reward=1.0, baseline=trained[0], group="overlap.intra_step").groups(frame=False)
    assert list(told) == ["group", "runs", "reached", "step_to_target", "s_to_target", "speedup", "low", "high"]
    assert (told["group"], told["runs"], told["reached"]) == (["off", "per_chunk"], [1, 1], [1, 1])
    assert told["speedup"][1] > told["speedup"][0] == 1
    assert told["low"] == [None, None], "one run a side has no interval"
    assert client.compare(trained).groups(frame=False)["group"] == []


def test_usage_saving_and_events(trained):
    run = trained[1]
    assert run.usage()["device_hours"] >= 0
    assert run.saving()["steps"] > 0
    assert {event["kind"] for event in run.events(["decision"])} == {"decision"}
    assert next(run.events(["state"]))["new"] == "succeeded"


def test_without_plotly_and_pandas_it_says_what_to_install(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match="pip install plotly"):
        trained[1].plot()
    with pytest.raises(MissingPackage, match="pip install plotly"):
        trained[1].timeline().show()
    with pytest.raises(MissingPackage, match="pip install pandas"):
        trained[1].metrics(REWARD, frame=True)
    assert isinstance(trained[1].metrics(REWARD), Table)


def test_a_card_shows_progress_and_a_curve(client, trained):
    shown = trained[1]._repr_html_()
    assert "succeeded" in shown
    assert "step 60 of 60" in shown
    assert f'href="{client.url}/runs/{trained[1].id}"' in shown


def test_a_run_is_replayed_as_from_its_events_file(client, live, spec, tmp_path):
    """Everything that `oppo simulate --from-run` needs comes through the API; more steps than one request returns."""
    run = client.submit(spec("replayed", steps=60, ppo={"batch_size": 4}))
    supervisor, story = live.start(run.id)
    engine = assemble(load_spec(run.spec()), cpu_devices(), lambda number: 3 + 7 * number % 29)
    list(steps_of(engine))
    file = write_recording(engine, tmp_path)
    events = [parse_event(line) for line in file.read_bytes().splitlines()]
    supervisor.tell([event.model_copy(update={"seq": story.seq + event.seq}) for event in events])
    supervisor.end("succeeded")
    here, there = read_recording(file), download_recording(client.get(run.id), 500)
    assert len(there.steps) == 60
    assert (there.steps, there.lengths, there.prompts) == (here.steps, here.lengths, here.prompts)
    assert there.spec == here.spec
    assert [there.devices_of(role) for role in ("actor", "critic")] == [here.devices_of(role) for role in ("actor", "critic")]
    assert len(download_recording(client.get(run.id), 20).steps) == 20

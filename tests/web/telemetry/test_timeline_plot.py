"""The Plotly figure of a timeline: it holds every recorded second once, in the page's own colours, and Plotly takes it."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go
import pytest
from hypothesis import given, settings

from oppo_platform.telemetry.palette import HATCH, THEMES, span_colour
from oppo_platform.telemetry.timeline_plot import MOST_LINKS, timeline_figure
from tests.web.telemetry.test_timeline_downsampling import DEVICES, STEP, WORK, spans_of, st

STATIC = Path(__file__).parents[3] / "static"


def step(n, work, idle=(), window=(0.0, 10.0), **more):
    rest = {"step": n, "chunk": [0] * len(work), "rows": [0] * len(work), "deferred": [], "flows": [], "counters": {}}
    return rest | spans_of(work, idle, window) | more


def told(*steps, lanes=(), devices=()):
    return {"lanes": [list(lane) for lane in lanes], "devices": list(devices), "steps": list(steps)}


def bars(figure):
    return [trace for trace in figure["data"] if trace["type"] == "bar"]


@settings(deadline=None, max_examples=60)
@given(st.lists(STEP, min_size=1, max_size=5))
def test_every_second_of_work_and_idle_time_is_in_one_bar(steps):
    reply = told(*(step(n, work, idle) for n, (work, idle) in enumerate(steps, start=1)))
    figure = timeline_figure(reply)
    go.Figure(figure)  # refuses what Plotly does not know
    json.dumps(figure, allow_nan=False)
    expected = Counter()
    for work, idle in steps:
        for _, role, phase, (start, end) in work:
            expected[span_colour(phase, role).replace("-", " ")] += end - start
        for _, cause, (start, end) in idle:
            expected[f"idle: {cause}"] += end - start
    assert {trace["name"]: sum(trace["x"]) for trace in bars(figure)} == pytest.approx(dict(expected))


@settings(deadline=None, max_examples=40)
@given(st.lists(WORK, max_size=12))
def test_lanes_do_not_touch_and_bars_lie_in_the_lane_of_their_role(work):
    figure = timeline_figure(told(step(1, work), lanes=[(DEVICES[0], "reward")], devices=DEVICES))
    names = dict(zip(figure["layout"]["yaxis"]["tickvals"], figure["layout"]["yaxis"]["ticktext"], strict=True))
    assert set(names.values()) >= {f"{DEVICES[0]} · reward", *(f"{device} · {role}" for device, role, *_ in work)}
    heights = sorted(names)
    assert all(later - earlier >= 1 for earlier, later in pairwise(heights))
    for trace in bars(figure):
        for middle, words in zip(trace["y"], trace["hovertext"], strict=True):
            device, role = names[middle].split(" · ")
            assert f"({role})" in words
            assert f" on {device}, " in words


def test_steps_lie_end_to_end_whatever_clock_their_attempts_had():
    early = [("cuda:0", "actor", "decode", (100.0, 101.0))]
    late = [("cuda:0", "actor", "decode", (7.0, 9.0))]
    figure = timeline_figure(told(step(1, early, window=(100.0, 102.0)), step(4, late, window=(7.0, 9.0))))
    [decode] = bars(figure)
    assert (decode["base"], decode["x"]) == ([0.0, 2.0], [1.0, 2.0])
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["step 1", "step 4"]


def test_hand_overs_join_a_chunk_with_its_readers_and_a_carpet_of_them_is_left_out():
    work = [
        ("cuda:0", "actor", "decode", (0.0, 1.0)),
        ("cuda:1", "critic", "score", (1.5, 2.0)),
        ("cuda:1", "critic", "score", (3, 4)),
    ]
    few = timeline_figure(told(step(1, work, chunk=[1, 1, 2])))
    [links] = [trace for trace in few["data"] if trace["name"] == "hand-over"]
    assert links["x"] == [1.0, 1.5, None]
    many = [step(n, work, chunk=[1, 1, 1]) for n in range(MOST_LINKS)]
    assert all(trace["type"] == "bar" for trace in timeline_figure(told(*many))["data"])


def test_deferred_sequences_are_drawn_where_they_were_begun_and_written_on():
    def part(start, end, age, trained):
        return {"sequence_id": 7, "start_s": start, "end_s": end, "age": age, "tokens": 40, "trained": trained}

    first = step(1, [], window=(0.0, 10.0), deferred=[part(2.0, 10.0, 1, False)])
    second = step(2, [], window=(10.0, 20.0), deferred=[part(10.0, 14.0, 1, True)])
    begun, on = timeline_figure(told(first, second))["data"]
    assert (begun["x"], on["x"]) == ([2.0, 10.0, None], [10.0, 14.0, None])
    assert begun["y"][0] == on["y"][0]
    assert "sequence 7" in on["hovertext"][0]


def test_names_are_text_not_mark_up():
    figure = timeline_figure(told(step(1, [("<b>gpu", "actor", "decode", (0.0, 1.0))])))
    assert figure["layout"]["yaxis"]["ticktext"] == ["&lt;b&gt;gpu · actor"]
    assert "<b>gpu" not in bars(figure)[0]["hovertext"][0]


def test_an_empty_timeline_is_an_empty_figure():
    figure = timeline_figure(told(devices=["cuda:0"]))
    assert figure["data"] == []
    go.Figure(figure)


def test_the_colours_are_those_of_the_pages():
    tokens = re.findall(r"--([a-z0-9-]+):\s*light-dark\((#\w{6}), (#\w{6})\)", (STATIC / "css/tokens.css").read_text())
    for place, theme in enumerate(("light", "dark")):
        of_page = {name: both[place] for name, *both in tokens}
        palette = THEMES[theme]
        assert {f"phase-{name}": c for name, c in palette.phase.items()} == {
            n: c for n, c in of_page.items() if n[:6] == "phase-"
        }
        assert {f"idle-{name}": c for name, c in palette.idle.items()} == {n: c for n, c in of_page.items() if n[:5] == "idle-"}
        plain = (palette.surface, palette.text, palette.text_2, palette.border)
        assert plain == tuple(of_page[name] for name in ("surface", "text", "text-2", "border"))
    [hatches] = re.findall(r"HATCH = \{(.+?)\};", (STATIC / "js/charts/plotly-theme.js").read_text(), re.DOTALL)
    assert dict(re.findall(r'(\w+): "(.+?)"', hatches.replace(r"\\", "\\"))) == HATCH


def test_the_api_gives_the_figure_of_the_steps_asked_for(world, events):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    spans = step(1, [("cuda:0", "actor", "decode", (0.0, 1.0))], [("cuda:0", "tail", (1.0, 10.0))])
    spans |= {"kind": "spans", "producer": "engine", "time": 1.0}
    worker.send_events(attempt_id, [events.started(1), events.step(2, 1, m=1.0), spans | {"seq": 3}])
    url = f"/api/v1/runs/{run.pk}/timeline/figure"
    dark = world.login("ada").get(url, {"from_step": 1, "to_step": 1, "theme": "dark"}).json()
    assert [trace["name"] for trace in dark["data"]] == ["idle: tail", "decode"]
    assert dark["layout"]["paper_bgcolor"] == THEMES["dark"].surface
    assert world.login("ada").get(url, {"theme": "pink"}).status_code == 422
    assert world.login("eve").get(url).status_code == 404

"""The drawings are what the engine's loop does: drawn anew they are the same, and they are drawings."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from scripts import pictures


@pytest.mark.parametrize("name", pictures.DRAWINGS)
def test_a_drawing_is_as_the_simulation_has_it(name: str) -> None:
    text = pictures.path_of(name).read_text(encoding="utf-8")
    assert text == pictures.drawing(name), "run `make docs`"
    root = ElementTree.fromstring(text)
    assert root.find("{*}title") is not None
    assert root.find("{*}desc") is not None
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_what_the_page_says_of_the_drawings_is_what_they_show() -> None:
    page = (pictures.ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")
    by_name = {name: pictures.told(name) for name in ("sequential", "intra", "both")}
    for name, run in by_name.items():
        seconds = [step["window_s"][1] - step["window_s"][0] for step in run.spans]
        idle = {
            device: sum(s * step[f"bubble/{device}"] for s, step in zip(seconds, run.metrics, strict=True)) / sum(seconds)
            for device in ("gpu:0", "gpu:1")
        }
        if name != "both":
            assert f"idle {100 * idle['gpu:0']:.0f} %" in " ".join(page.split())
            assert f"{100 * idle['gpu:1']:.0f} %" in page
        else:
            assert f"{1e6 * run.seconds / run.tokens:.0f} µs a trained token" in " ".join(page.split())
    # Streaming changes when, and not what.
    tokens = [[step["perf/total_num_tokens"] for step in by_name[name].metrics] for name in ("sequential", "intra")]
    assert tokens[0] == tokens[1]

"""The picture of `bench/convergence.py --plot`: faint curves of all seeds, and each variant's median."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from playwright.sync_api import sync_playwright

SIZE = {"width": 1000, "height": 520}
COLOURS = {"sequential": "#64748b", "oppo": "#2563eb"}
SMOOTHED = 10  # steps


def draw(path: Path, runs: list[Any], target: float) -> None:
    """Write the curves of `runs` (each with `variant` and `scores`) as a PNG file.

    A headless Chromium renders it: $OPPO_CHROMIUM, or one on PATH.
    """
    figure = curves(runs, target)
    browser_path = os.environ.get("OPPO_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "figure.html"
        figure.write_html(page_file, config={"staticPlot": True})
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, device_scale_factor=2)  # type: ignore[arg-type]
        page.goto(page_file.as_uri())
        page.wait_for_selector(".main-svg")
        page.locator(".plotly-graph-div").screenshot(path=path)
        browser.close()


def curves(runs: list[Any], target: float) -> go.Figure:
    """Training score over steps, a moving mean of ten steps."""
    figure = go.Figure()
    for variant, colour in COLOURS.items():
        rows = [smooth(run.scores) for run in runs if run.variant == variant]
        steps = np.arange(len(rows[0])) + SMOOTHED
        for row in rows:
            figure.add_scatter(x=steps, y=row, mode="lines", line={"color": colour, "width": 1}, opacity=0.25, showlegend=False)
        figure.add_scatter(
            x=steps, y=np.median(rows, axis=0), mode="lines", line={"color": colour, "width": 3},
            name=f"{variant}, median of {len(rows)} seeds",
        )  # fmt: skip
    figure.add_hline(y=target, line={"color": "#b45309", "width": 1, "dash": "dash"}, annotation_text=f"target {target:g}")
    figure.update_layout(
        **SIZE, template="plotly_white", font={"family": "system-ui, sans-serif", "size": 15},
        xaxis_title="PPO steps", yaxis_title=f"mean training score ({SMOOTHED}-step mean)",
        legend={"x": 0.98, "y": 0.05, "xanchor": "right", "yanchor": "bottom"}, margin={"l": 70, "r": 20, "t": 20, "b": 60},
    )  # fmt: skip
    return figure


def smooth(scores: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Moving mean."""
    return np.convolve(scores, np.ones(SMOOTHED) / SMOOTHED, mode="valid")

"""Execute examples/notebooks on a temporary platform and save their outputs: `make notebooks`.

Outputs are small and reproducible: figures as PNG (GitHub renders them), the default address of `oppo up`, no paths.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
FIGURE, PNG = "application/vnd.plotly.v1+json", "image/png"
DEFAULT_URL = "http://127.0.0.1:8000"
CELL_TIMEOUT_S = 900
WIDTH, HEIGHT = 900, 420


def main() -> None:
    """Execute and save all notebooks, or those on the command line."""
    paths = [Path(name) for name in sys.argv[1:]] or NOTEBOOKS
    with tempfile.TemporaryDirectory(prefix="oppo-notebooks-") as scratch, _platform(Path(scratch)) as url:
        for path in paths:
            notebook = execute(path, Path(scratch))
            for cell in notebook.cells:
                normalize(cell, url, scratch)
            nbformat.write(notebook, path)
            print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


def execute(path: Path, folder: Path) -> Any:
    """Execute a notebook in `folder`. Raises CellExecutionError."""
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"  # figures as data, without plotly.js
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return notebook


def normalize(cell: Any, url: str, scratch: str) -> None:
    """Remove machine-specific output from a cell and render its figures."""
    if cell.cell_type != "code":
        return
    cell.metadata.clear()
    outputs = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stderr":
            continue
        data = output.get("data", {})
        if FIGURE in data:
            output["data"] = {PNG: render_figure(data[FIGURE]), "text/plain": "(a Plotly figure)"}
        for texts in (data, output):
            for kind, text in texts.items():
                if isinstance(text, str) and kind != PNG:
                    texts[kind] = text.replace(url, DEFAULT_URL).replace(scratch, ".")
        output.get("metadata", {}).clear()
        outputs.append(output)
    cell.outputs = outputs


def render_figure(figure: dict[str, Any]) -> str:
    """A figure as base64 PNG, rendered in Chromium."""
    import plotly.graph_objects as graph
    from playwright.sync_api import sync_playwright

    layout = {**figure["layout"], "width": WIDTH, "height": figure["layout"].get("height", HEIGHT)}
    page_text = graph.Figure({"data": figure["data"], "layout": layout}).to_html(
        include_plotlyjs=True, config={"staticPlot": True}
    )
    browser_path = os.environ.get("OPPO_CHROMIUM") or None
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH + 40, "height": 1200})
        (Path(folder) / "figure.html").write_text(page_text)
        page.goto(f"file://{folder}/figure.html")
        page.wait_for_selector(".main-svg")
        png = page.locator(".js-plotly-plot").screenshot()
        browser.close()
    return base64.b64encode(png).decode()


@contextmanager
def _platform(scratch: Path) -> Iterator[str]:
    """Run `oppo up` in `scratch` with small models, and configure the client by OPPO_URL and OPPO_TOKEN. Yields its URL."""
    home = scratch / "home"
    make = [sys.executable, "-m", "examples.own.make", str(home / "models" / "own")]
    subprocess.run(make, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    environ = {**os.environ, "OPPO_HOME": str(home)}
    oppo = [sys.executable, "-m", "oppo_cli"]
    up = subprocess.Popen([*oppo, "up"], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert up.stdout is not None
        url = next(line.split()[3] for line in up.stdout if line.startswith("OPPO runs at"))
        token = subprocess.run([*oppo, "admin", "token", "admin"], env=environ, check=True, capture_output=True, text=True)
        os.environ.update(OPPO_URL=url, OPPO_TOKEN=token.stdout.strip())
        yield url
    finally:
        up.terminate()
        up.wait()


if __name__ == "__main__":
    main()

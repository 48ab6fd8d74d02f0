"""Execute the notebooks in examples/notebooks on a platform of their own, and keep what they print: `make notebooks`.

Outputs are kept small and the same from machine to machine where they can be: figures as pictures, which GitHub shows, too; the
platform's address as `oppo up` usually has it; no times, no paths.
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
FIGURE, PICTURE = "application/vnd.plotly.v1+json", "image/png"
USUAL_ADDRESS = "http://127.0.0.1:8000"
CELL_WITHIN_S = 900
WIDE, HIGH = 900, 420


def main() -> None:
    """Execute all, or those named on the command line, and write them."""
    named = [Path(name) for name in sys.argv[1:]] or NOTEBOOKS
    with tempfile.TemporaryDirectory(prefix="oppo-notebooks-") as scratch, _platform(Path(scratch)) as url:
        for path in named:
            notebook = executed(path, Path(scratch))
            for cell in notebook.cells:
                tidy(cell, url, scratch)
            nbformat.write(notebook, path)
            print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


def executed(path: Path, folder: Path) -> Any:
    """The notebook, its cells run one after the other in `folder`. Raises CellExecutionError with what a cell raised."""
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"  # a figure as data, and not with all of plotly.js
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_WITHIN_S, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return notebook


def tidy(cell: Any, url: str, scratch: str) -> None:
    """Leave out of a cell what differs from machine to machine, and draw its figures."""
    if cell.cell_type != "code":
        return
    cell.metadata.clear()
    kept = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stderr":
            continue
        data = output.get("data", {})
        if FIGURE in data:
            output["data"] = {PICTURE: picture(data[FIGURE]), "text/plain": "(a Plotly figure)"}
        for held in (data, output):
            for kind, text in held.items():
                if isinstance(text, str) and kind != PICTURE:
                    held[kind] = text.replace(url, USUAL_ADDRESS).replace(scratch, ".")
        output.get("metadata", {}).clear()
        kept.append(output)
    cell.outputs = kept


def picture(figure: dict[str, Any]) -> str:
    """A figure as a browser draws it, as PNG in base64."""
    import plotly.graph_objects as graph
    from playwright.sync_api import sync_playwright

    layout = {**figure["layout"], "width": WIDE, "height": figure["layout"].get("height", HIGH)}
    page_text = graph.Figure({"data": figure["data"], "layout": layout}).to_html(
        include_plotlyjs=True, config={"staticPlot": True}
    )
    browser_path = os.environ.get("OPPO_CHROMIUM") or None
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDE + 40, "height": 1200})
        (Path(folder) / "figure.html").write_text(page_text)
        page.goto(f"file://{folder}/figure.html")
        page.wait_for_selector(".main-svg")
        drawn = page.locator(".js-plotly-plot").screenshot()
        browser.close()
    return base64.b64encode(drawn).decode()


@contextmanager
def _platform(scratch: Path) -> Iterator[str]:
    """`oppo up` in a folder of its own, with the small models; the client finds it. Yields its address."""
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

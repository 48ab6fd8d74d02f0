"""Pictures of the pages for the documentation, from a platform that is running.

    python tests/browser/screenshots.py http://127.0.0.1:8000 LOGIN_LINK docs/img

`oppo login-link` prints the link. The run shown is the newest with overlap that has trained; compared are it and the newest
sequential one; the plan is that of the newest run that succeeded and has one. A platform without runs shows the checklist of a
first run. Each page is taken in light and dark at 1440 × 900, and 1024 and 390 pixels wide.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

SHAPES: dict[str, dict[str, Any]] = {
    "": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
    "-dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "-1024": {"viewport": {"width": 1024, "height": 900}, "color_scheme": "light"},
    "-narrow": {"viewport": {"width": 390, "height": 860}, "color_scheme": "light"},
}
RESPONSES = ":is(#prompts article, #nothing:not([hidden]))"  # of held-out prompts, of which a run may have none
# Pictures of a page further down, with what is scrolled to; and after a key, with what it opens.
SCROLLED = {"metrics": "#h-pinned", "plan-and-actual": ".plan-review tbody tr:last-child"}
# Plotly has drawn every chart in view.
DRAWN = """() => [...document.querySelectorAll(".plot")].every((plot) => {
  const { top, bottom, height } = plot.getBoundingClientRect();
  return !height || bottom < 0 || top > innerHeight || plot.querySelector(".main-svg");
})"""
OPENED = {"palette": ("Control+k", "dialog.palette[open]")}


def main() -> None:
    """Read the command line and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base_url")
    parser.add_argument("login_link")
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    given = os.environ.get("OPPO_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given, args=["--no-sandbox", "--disable-gpu"])
        shoot(browser, asked.base_url.rstrip("/"), asked.login_link, asked.folder)
        browser.close()


def shoot(browser: Browser, base_url: str, login_link: str, folder: Path) -> None:
    """Log in once and take every page in every shape."""
    context = browser.new_context(base_url=base_url)
    context.new_page().goto(login_link)
    state = context.storage_state()
    runs = context.request.get("/api/v1/runs?limit=200").json()["items"]
    pages = addresses(runs)
    for run in runs:
        if run["state"] == "succeeded" and context.request.get(f"/api/v1/runs/{run['id']}").json()["plan"]:
            pages["plan-and-actual"] = (f"/runs/{run['id']}", ".plan-review")
            break
    context.close()
    for suffix, shape in SHAPES.items():
        context = browser.new_context(base_url=base_url, storage_state=state, **shape)
        for name, (path, shown) in pages.items():
            page = context.new_page()
            page.goto(path)
            page.wait_for_selector(shown, state="attached")
            if name in SCROLLED:
                page.locator(SCROLLED[name]).scroll_into_view_if_needed()
            if name in OPENED:
                page.keyboard.press(OPENED[name][0])
                page.wait_for_selector(OPENED[name][1])
            page.wait_for_function(DRAWN)
            page.wait_for_timeout(1500)  # a change of colours has ended, and a canvas is drawn
            page.screenshot(path=folder / f"{name}{suffix}.png")
            page.close()
        context.close()


def addresses(runs: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Picture → (path, what must be there before it is taken)."""
    trained = [run for run in runs if run["step"]]
    newest = {
        "sequential": next((run["id"] for run in trained if run["preset"] == "sequential"), None),
        "oppo": next((run["id"] for run in trained if run["preset"] != "sequential"), None),
    }
    pages = {"alerts": ("/alerts?show=all", "main h1"), "queue": ("/queue", "#queue section")}
    if runs:
        pages |= {"runs": ("/runs", "#rows tr"), "palette": ("/runs", "#rows tr")}
    else:
        pages["first-run"] = ("/runs", "#first-run li")
    if newest["oppo"]:
        run = f"/runs/{newest['oppo']}"
        pages |= {
            "submit": (f"/runs/new?from={newest['oppo']}", "#plan-estimates:not([hidden])"),
            "run": (run, "#plot-reward .main-svg >> nth=0"),
            "metrics": (run, "#metric-groups .metric >> nth=3"),
            "side-by-side": (f"{run}/samples/side-by-side", RESPONSES),
            "timeline": (f"{run}/timeline", "#worst li >> nth=0"),
            "utilization": (f"{run}/utilization", "#plot-phases .main-svg >> nth=0"),
            "samples": (f"{run}/samples", "#rows tr >> nth=0"),
            "logs": (f"{run}/logs", "#log"),
            "checkpoints": (f"{run}/checkpoints", "#checkpoints tr >> nth=0"),
            "events": (f"{run}/events", "#events tr >> nth=0"),
        }
    if all(newest.values()):
        both = f"runs={newest['sequential']},{newest['oppo']}"
        pages |= {
            "compare": (f"/compare?{both}", "#plot-reward .main-svg >> nth=0"),
            "compare-samples": (f"/compare/samples?{both}", RESPONSES),
        }
    return pages


if __name__ == "__main__":
    main()

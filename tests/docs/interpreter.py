"""Executes blocks of Python one after the other in one namespace, as a notebook does: `await` may stand outside of functions.

Reads a JSON object a line,
`{"page", "line", "text"}`, and answers with one, `{"printed", "error"}`. Errors name the lines of the page.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import sys
import traceback
from typing import Any


def main() -> None:
    """Until the input ends."""
    replies, namespace = sys.stdout, {"__name__": "__main__"}
    _show_nothing()
    with asyncio.Runner() as runner:
        for asked in map(json.loads, sys.stdin):
            printed, error = io.StringIO(), ""
            with contextlib.redirect_stdout(printed):
                try:
                    execute(asked, namespace, runner)
                except BaseException:  # noqa: BLE001 - whatever a page's code raises is its reader's to see
                    error = traceback.format_exc()
            print(json.dumps({"printed": printed.getvalue(), "error": error}), file=replies, flush=True)


def execute(asked: dict[str, Any], namespace: dict[str, Any], runner: asyncio.Runner) -> None:
    """Run one block."""
    placed = "\n" * asked["line"] + asked["text"]
    code = compile(placed, asked["page"], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, namespace)
    if inspect.iscoroutine(result):
        runner.run(result)


def _show_nothing() -> None:
    """Figures that are shown go nowhere: nobody looks at a browser here."""
    with contextlib.suppress(ImportError):
        import plotly.io

        plotly.io.renderers.default = None


if __name__ == "__main__":
    main()

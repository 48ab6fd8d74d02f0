"""Notebooks as pages: their text, their code, and what was printed when they were executed last (`make notebooks`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PICTURE, TABLE, TEXT = "image/png", "text/html", "text/plain"


def as_markdown(path: Path) -> str:
    """The page of a notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return "\n\n".join(_cell(cell) for cell in notebook["cells"]) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    return "\n\n".join([f"```python\n{text}\n```", *(_output(output) for output in cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {TEXT: output.get("text", "")})
    if PICTURE in data:
        return f"![figure](data:image/png;base64,{''.join(data[PICTURE]).strip()})"
    if TABLE in data:
        return f'<div class="output">{"".join(data[TABLE])}</div>'
    return f"```text\n{''.join(data[TEXT]).rstrip()}\n```"

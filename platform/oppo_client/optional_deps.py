"""Optional packages: pandas for DataFrames, plotly for figures, IPython for live output in notebooks."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from oppo_client.errors import MissingPackage


def import_optional(name: str) -> Any | None:
    """The module, or None if its package is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.split(".")[0] == error.name.split(".")[0]:
            return None
        raise


def require(name: str, what: str) -> Any:
    """The module. Raises `MissingPackage`."""
    module = import_optional(name)
    if module is None:
        package = name.split(".")[0]
        raise MissingPackage(f"{what} needs {package}, which is not installed: pip install {package}")
    return module


def in_notebook() -> bool:
    """Whether the code runs in a Jupyter notebook. IPython is not imported: a notebook has it imported already."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell"

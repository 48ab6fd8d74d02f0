"""A run's spec as a Python snippet that submits it with the notebook client."""

from __future__ import annotations

from pprint import pformat
from typing import Any

from oppo_contract.spec import load_spec
from oppo_contract.spec_errors import SpecError
from oppo_platform.runs.models import Run

SNIPPET = """\
# The platform's address and your token: saved by `oppo login`, or in OPPO_URL and OPPO_TOKEN.
from oppo_client import Client

SPEC = {spec}

client = Client()
run = client.submit(SPEC, project={number})  # {name}
print(run.url)
"""


def spec_python(run: Run) -> str:
    """Python source that submits the same spec, defaults included, to the run's project."""
    spec = pformat(_plain(run), width=100, sort_dicts=False)
    return SNIPPET.format(spec=spec, number=run.project_id, name=" ".join(run.project.name.split()))


def _plain(run: Run) -> dict[str, Any]:
    """The spec in the schema's order; one from before stricter validation as stored."""
    try:
        return load_spec(run.spec).model_dump(mode="json")
    except SpecError:
        return dict(run.spec)

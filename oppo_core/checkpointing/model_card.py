"""The model card (README.md) of an exported actor."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from oppo_contract.model_folder import TINY
from oppo_contract.spec import RunSpec
from oppo_contract.yaml_text import dump_yaml
from oppo_core.checkpointing.save_restore import run_score

CARD = "README.md"
LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
READ_CHARACTERS = 64 * 1024
MARKUP = re.compile(r"[\\`*\[\]<>#|!]")  # what Markdown would interpret in a name
HOW_TO_LOAD = {
    "transformers": """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```
""",
    "peft": """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "FOLDER")
```

`oppo export --merge` writes a model that loads without peft.
""",
    "oppo": "As the actor of another run: `models.actor: {path: FOLDER}`.\n",
}


def model_card(spec: RunSpec, state: dict[str, Any], folder: Path, base: Path | None) -> str:
    """Markdown with front matter for the actor in `folder`.

    Args:
        state: the checkpoint's `state.json`.
        base: the folder that the actor was loaded from, for its licence; None if it is not here or there is none.
    """
    library, licence = _library(folder), stated_licence(base)
    name = spec.models.actor.path or "a random initialisation"
    title = MARKUP.sub(r"\\\g<0>", spec.name)
    front = {"library_name": library, "tags": ["rlhf", spec.ppo.algorithm], **({"license": licence} if licence else {})}
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items())
    return f"""\
---
{lines}
---

# {title}

{"LoRA adapters for" if _has_adapters(folder) else "Trained from"} `{name}` with {spec.ppo.algorithm} by OPPO Platform.
Prompts: `{spec.data.prompts}`.

{_figures(spec, state)}

## Licence

{_licence_text(licence, base)}

## Load

{HOW_TO_LOAD[library]}
## Settings

Settings that differ from the defaults:

```yaml
{dump_yaml(spec.model_dump(mode="json", exclude_defaults=True)).rstrip()}
```
"""


def _figures(spec: RunSpec, state: dict[str, Any]) -> str:
    """A table of the last step's figures; without those that were not measured."""
    scores = run_score(state)
    figures = {
        "Steps": f"{state['progress']['step']} of {spec.steps}",
        "Mean reward of the last step": _number(scores.score),
        "Mean reward of the last evaluation": _number(scores.evaluation),
        "Mean KL to the reference in the last step, nats per response": _number(scores.kl),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {title} | {value} |" for title, value in figures.items() if value)])


def stated_licence(base: Path | None) -> str:
    """The licence that the front matter of a model folder's README.md states; empty if it states none."""
    if base is None or not (base / CARD).is_file():
        return ""
    with (base / CARD).open(encoding="utf-8", errors="replace") as file:
        front = re.match(r"---\n(.*?\n)---", file.read(READ_CHARACTERS), re.DOTALL)
    found = re.search(r"^license:[ \t]*[\"']?([\w.+-]+)[\"']?[ \t]*$", front[1], re.MULTILINE) if front else None
    return found[1] if found else ""


def _licence_text(licence: str, base: Path | None) -> str:
    if licence:
        return f"The base model's card states `{licence}`."
    file = next((name for name in LICENSE_FILES if base is not None and (base / name).is_file()), None)
    return f"See `{file}` in the base model's folder." if file else "Not known here: see the base model."


def _library(folder: Path) -> str:
    if _has_adapters(folder):
        return "peft"
    return "oppo" if json.loads((folder / "config.json").read_text()).get("model_type") == TINY else "transformers"


def _has_adapters(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4g}"

"""docs/configuration.md: settings of a run, from the fields of `RunSpec`."""

from __future__ import annotations

from itertools import groupby

from oppo_contract.fields import FieldDoc, SpecSchema
from oppo_contract.spec import MAX_SPEC_BYTES, RunSpec

# Every model has the same keys; they are listed once, for the actor.
LIKE_THE_ACTOR = ("models.reward.model.", "models.reference.", "models.critic.")
# A part of a reward has the keys of a reward.
LIKE_THE_REWARD = ("models.reward.parts[].model.", "models.reward.parts[].http.")
HEAD = f"""\
# Configuration

The schema `RunSpec` defines the form in the browser, the YAML file, the body of the API call and the engine's settings. This page
is generated from it by `make docs`: change `platform/oppo_contract/spec.py` and `sections/`, not this page.

A run needs `name`, `steps`, `models.actor`, `models.reward` and `data.prompts`; everything else has a default:

```yaml spec
name: first run
steps: 200
models:
  actor: {{path: models/actor}}
  reward: {{model: {{path: models/reward}}}}
data: {{prompts: prompts.jsonl}}
```

The text is YAML 1.2, of which JSON is a subset: `1e-5` is a number, `off` is a string, keys are unique, aliases and tags are
not supported, and the limit is {MAX_SPEC_BYTES // 1024} KiB. Values are not converted: `"1"` is not a number. Unknown keys and
invalid values are rejected together, each with the field's path, the value, what is allowed and the nearest valid key, by
`oppo spec check FILE`, the form and the API. A setting without effect under the others (such as `ppo.tis_cap` with
`ppo.tis: off`) is rejected unless it is the default; settings of a controller in `overlap` may stay when it is disabled.
`oppo spec schema` prints the JSON schema.

Symbols such as B, Δ and C are explained in [algorithm.md](algorithm.md). *empty* means `null`.
"""


def page() -> str:
    """The whole page as Markdown."""
    field_docs = [
        note
        for note in SpecSchema(RunSpec.model_json_schema()).field_docs()
        if not note.path.startswith(LIKE_THE_ACTOR + LIKE_THE_REWARD)
    ]
    by_section = sorted(enumerate(field_docs), key=lambda numbered: (_first_line(field_docs, _section(numbered[1])), numbered[0]))
    parts = [HEAD]
    for section, numbered in groupby(by_section, key=lambda numbered: _section(numbered[1])):
        parts.append(_table(section, [note for _, note in numbered], field_docs))
    return "\n".join(parts)


def _section(note: FieldDoc) -> str:
    return note.path.rpartition(".")[0]


def _first_line(field_docs: list[FieldDoc], section: str) -> int:
    # Order of sections: where each is first mentioned.
    return next((number for number, note in enumerate(field_docs) if note.path == section.removesuffix("[]")), -1)


def _table(section: str, fields: list[FieldDoc], field_docs: list[FieldDoc]) -> str:
    meaning = next((note.description for note in field_docs if note.path == section.removesuffix("[]")), "The run as a whole.")
    rows = [f"| `{note.path.rpartition('.')[2]}` | {_allowed(note)} | {_default(note)} | {note.description} |" for note in fields]
    head = [
        f"## `{section}`" if section else "## The run",
        "",
        meaning,
        "",
        "| key | allowed | default | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def _allowed(note: FieldDoc) -> str:
    if f"{note.path}." in LIKE_THE_REWARD:
        return f"as `{note.path.replace('parts[].', '')}`, or empty"
    if note.path.startswith("models.") and note.is_section and f"{note.path}." in LIKE_THE_ACTOR:
        types, mapping, _ = note.allowed.partition(", or a mapping")
        return f"{types}, or as `models.actor`" if mapping else "as `models.actor`"
    if note.is_section:
        if note.allowed.startswith("a list"):
            return f"a list of mappings: [`{note.path}[]`](#{note.path.replace('.', '')})"
        return f"a section: [`{note.path}`](#{note.path.replace('.', '')})"
    return note.allowed.removesuffix(", or null") + (", or empty" if note.allowed.endswith(", or null") else "")


def _default(note: FieldDoc) -> str:
    if note.is_required:
        return "**required**"
    if note.default is None:
        return ""
    return "*empty*" if note.default == "null" else f"`{note.default.strip(chr(34))}`"

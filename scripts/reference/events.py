"""docs/reference/events.md: every event of an attempt with its fields, from the contract's models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from oppo_contract import events as contract
from scripts.reference.markdown import WRITTEN, code, linked, table

HEAD = f"""\
# Events

{WRITTEN}, from `oppo_contract/events.py`.

What an attempt tells while it runs, one JSON object a line: first into a file on the worker's disk, then over HTTP to the
platform, which applies each number of each producer exactly once
([delivery](../delivery.md#telemetry-exactly-once)). `oppo train` leaves the same file. Unknown keys are errors.
Times are seconds since 1970 in the envelope, and seconds since the attempt's `started` event within `step` and `spans`. JSON
has no non-finite numbers: they travel as `"NaN"`, `"Infinity"` and `"-Infinity"`. An event has at most
{contract.MAX_EVENT_BYTES // 1024} KiB, a step at most {contract.MAX_METRICS_PER_STEP} metrics.

When the outbox is full, the engine leaves out {", ".join(code(kind) for kind in contract.DETAIL_KINDS)} and says so by `left_out`
([storage](../storage.md#when-the-platform-is-away-for-long)).
"""


def page() -> str:
    """The whole page as Markdown."""
    kinds = [(kind(model), f"[`{kind(model)}`](#{kind(model)})", _says(model)) for model in models()]
    parts = [HEAD, table(("event", "tells"), ((link, says) for _, link, says in kinds))]
    parts.append(_section("The envelope", contract.Envelope, ()))
    parts += [_section(code(kind(model)), model, set(contract.Envelope.model_fields) | {"kind"}) for model in models()]
    parts += [_section(title, model, ()) for title, model in PARTS.items()]
    return "\n".join(parts)


# What events hold lists of.
PARTS: dict[str, type[BaseModel]] = {"A deferred sequence": contract.DeferredSequence, "A sample": contract.Sample}


def models() -> tuple[type[contract.Envelope], ...]:
    """Every event, in the order of the contract."""
    return get_args(get_args(contract.Event)[0])


def kind(model: type[BaseModel]) -> str:
    """The word by which an event is told from others."""
    return str(model.model_fields["kind"].default)


def fields(model: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    """(name, type, meaning) of each field."""
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    for name, told in properties.items():
        yield name, words_of(told), linked(model.model_fields[name].description or "")


def words_of(schema: dict[str, Any], within: bool = False) -> str:
    """A JSON schema's type, for people. `within`: it is part of another one's."""
    if "$ref" in schema:
        title = next(title for title, model in PARTS.items() if model.__name__ == schema["$ref"].rpartition("/")[2])
        return f"[{title}](#{title.lower().replace(' ', '-')})"
    if "enum" in schema:
        choices = ", ".join(code(str(choice)) for choice in schema["enum"])
        return f"({choices})" if within else choices
    if "anyOf" in schema:
        return " or ".join(words_of(each) for each in schema["anyOf"])
    if "prefixItems" in schema:
        return f"[{', '.join(words_of(item, within=True) for item in schema['prefixItems'])}]"
    kinds = {"array": "list of ", "object": "object of "}
    inner = schema.get("items", schema.get("additionalProperties"))
    kind = str(schema.get("type", "any"))
    return kinds[kind] + words_of(inner, within=True) if isinstance(inner, dict) and inner else kind


def _says(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").split("\n\n")[0]


def _section(title: str, model: type[BaseModel], without: Any) -> str:
    rows = [(code(name), kinds, says) for name, kinds, says in fields(model) if name not in without]
    return f"## {title}\n\n{_says(model)}\n\n" + table(("field", "type", "meaning"), rows)

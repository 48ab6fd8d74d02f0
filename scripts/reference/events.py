"""docs/reference/events.md: events of an attempt with their fields, from the contract's models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from oppo_contract import events as contract
from scripts.reference.markdown import GENERATED, code, linked, table

HEAD = f"""\
# Events

{GENERATED} from `oppo_contract/events.py`.

Telemetry of an attempt, one JSON object per line: written to a file on the worker's disk, then sent over HTTP to the platform,
which applies each number of each producer exactly once ([delivery](../delivery.md#telemetry-exactly-once)). `oppo train` writes
the same file. Unknown keys are errors. Times are seconds since 1970 in the envelope, and seconds since the attempt's `started`
event within `step` and `spans`. Non-finite numbers are encoded as `"NaN"`, `"Infinity"` and `"-Infinity"`. An event has at most
{contract.MAX_EVENT_BYTES // 1024} KiB, a step at most {contract.MAX_METRICS_PER_STEP} metrics.

When the outbox is full, the engine drops {", ".join(code(kind) for kind in contract.DETAIL_KINDS)} and reports it by `left_out`
([storage](../storage.md#when-the-platform-is-away-for-long)).
"""


def page() -> str:
    """The whole page as Markdown."""
    kinds = [(kind(model), f"[`{kind(model)}`](#{kind(model)})", _summary(model)) for model in models()]
    parts = [HEAD, table(("event", "content"), ((link, summary) for _, link, summary in kinds))]
    parts.append(_section("The envelope", contract.Envelope, ()))
    parts += [_section(code(kind(model)), model, set(contract.Envelope.model_fields) | {"kind"}) for model in models()]
    parts += [_section(title, model, ()) for title, model in PARTS.items()]
    return "\n".join(parts)


# Models that events contain lists of.
PARTS: dict[str, type[BaseModel]] = {
    "A deferred sequence": contract.DeferredSequence,
    "A sample": contract.Sample,
    "A chat turn": contract.ChatTurn,
    "Provenance": contract.Provenance,
    "A git state": contract.GitState,
}


def models() -> tuple[type[contract.Envelope], ...]:
    """Every event, in the order of the contract."""
    return get_args(get_args(contract.Event)[0])


def kind(model: type[BaseModel]) -> str:
    """The value of an event's `kind`."""
    return str(model.model_fields["kind"].default)


def fields(model: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    """(name, type, meaning) of each field."""
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    for name, schema in properties.items():
        yield name, type_text(schema), linked(model.model_fields[name].description or "")


def type_text(schema: dict[str, Any], nested: bool = False) -> str:
    """Text of a JSON schema's type. `nested`: within another type."""
    if "$ref" in schema:
        title = next(title for title, model in PARTS.items() if model.__name__ == schema["$ref"].rpartition("/")[2])
        return f"[{title}](#{title.lower().replace(' ', '-')})"
    if "enum" in schema:
        choices = ", ".join(code(str(choice)) for choice in schema["enum"])
        return f"({choices})" if nested else choices
    if "anyOf" in schema:
        return " or ".join(type_text(each) for each in schema["anyOf"])
    if "prefixItems" in schema:
        return f"[{', '.join(type_text(item, nested=True) for item in schema['prefixItems'])}]"
    kinds = {"array": "list of ", "object": "object of "}
    inner = schema.get("items", schema.get("additionalProperties"))
    kind = str(schema.get("type", "any"))
    return kinds[kind] + type_text(inner, nested=True) if isinstance(inner, dict) and inner else kind


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").split("\n\n")[0]


def _section(title: str, model: type[BaseModel], without: Any) -> str:
    rows = [(code(name), types, meaning) for name, types, meaning in fields(model) if name not in without]
    return f"## {title}\n\n{_summary(model)}\n\n" + table(("field", "type", "meaning"), rows)

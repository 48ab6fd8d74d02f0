"""Parses and writes specs as YAML 1.2: `1e-5` is a number, `off` is text; duplicate keys, aliases and tags are errors."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from oppo_contract.spec import MAX_SPEC_BYTES, RunSpec, load_spec
from oppo_contract.spec_errors import SpecError, SpecProblem

if TYPE_CHECKING:
    from ruamel.yaml.events import Event
    from ruamel.yaml.nodes import ScalarNode
    from ruamel.yaml.representer import SafeRepresenter

MAX_DEPTH = 20
MAX_VALUES = 10_000
TOO_DEEP = f"is nested deeper than {MAX_DEPTH} levels"
TOO_MANY = f"contains more than {MAX_VALUES:,} keys and values"


def parse_yaml(text: str) -> Any:
    """Plain data from YAML (or JSON, which is YAML).

    Raises:
        SpecError: text over 256 KiB, broken syntax (with line and column), a repeated key, an alias or a tag,
            nesting deeper than 20, or more than 10,000 keys and values.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    _check_bytes(text)
    yaml = YAML(typ="safe", pure=True)
    yaml.allow_duplicate_keys = False
    try:
        _check_events(yaml.parse(io.StringIO(text)))
        return yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _error(f"is not valid YAML{where}: {error.problem or error.context}") from None
    except SpecError:
        raise
    except (YAMLError, ValueError) as error:
        raise _error(f"is not valid YAML: {str(error).splitlines()[0]}") from None


def check_size(data: Any) -> None:
    """Apply the limits of `parse_yaml` to JSON data, which may be written as YAML later. Raises `SpecError`."""
    level, values, depth = [data], 1, 2  # YAML's stream and document events count as two levels
    while level := [value for value in level if isinstance(value, dict | list)]:
        level, depth = [inner for value in level for inner in _children(value)], depth + 1
        values += len(level)
        if depth > MAX_DEPTH:
            raise _error(TOO_DEEP)
        if values > MAX_VALUES:
            raise _error(TOO_MANY)
    _check_bytes(json.dumps(data, ensure_ascii=False))


def _children(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return (*value, *value.values()) if isinstance(value, dict) else value


def _check_bytes(text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_SPEC_BYTES:
        raise _error(f"is {size:,} bytes long; at most {MAX_SPEC_BYTES:,} are accepted")


def _check_events(events: Iterable[Event]) -> None:
    # Before construction: aliases could expand a small text without bound.
    depth = 0
    for number, event in enumerate(events):
        name = type(event).__name__
        depth += name.endswith("StartEvent") - name.endswith("EndEvent")
        if name == "AliasEvent":
            raise _error(f"uses an alias (*) at line {event.start_mark.line + 1}; repeat the value instead")
        if getattr(event, "tag", None) is not None:
            raise _error(f"uses a tag (!) at line {event.start_mark.line + 1}; use the plain value")
        if depth > MAX_DEPTH:
            raise _error(TOO_DEEP)
        if number > MAX_VALUES:
            raise _error(TOO_MANY)


def _error(message: str) -> SpecError:
    return SpecError([SpecProblem("", message)])


def load_yaml(text: str) -> RunSpec:
    """Parse and check a spec written as YAML. Raises `SpecError`, as `parse_yaml` and `load_spec` do."""
    data = parse_yaml(text)
    if data is None:
        raise _error("is empty; start from `oppo spec example`")
    return load_spec(data)


def dump_yaml(data: Any) -> str:
    """Plain data (a spec's `model_dump(mode="json")`) as YAML that `parse_yaml` reads back unchanged."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    # Set before `yaml.representer` is first accessed, which reads both once.
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.representer.yaml_representers = {**yaml.representer.yaml_representers, str: _text_node}
    out = io.StringIO()
    yaml.dump(data, out)
    return out.getvalue()


def _text_node(representer: SafeRepresenter, text: str) -> ScalarNode:
    # Escape line-break characters such as U+0085, which would be read back as a space.
    style = None if text.isprintable() else '"'
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)

"""A spec as YAML 1.2 text: `1e-5` is a number, `off` is a word, a key may stand only once, nothing is executed."""

from __future__ import annotations

import io
from typing import Any

from oppo_contract.problems import SpecError, SpecProblem
from oppo_contract.spec import MAX_SPEC_BYTES, RunSpec, load_spec

MAX_DEPTH = 20


def parse_yaml(text: str) -> Any:
    """Plain data from YAML (or JSON, which is YAML).

    Raises:
        SpecError: text over 256 KiB, broken syntax (with line and column), a repeated key, an alias or a custom tag,
            or nesting deeper than 20.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.events import AliasEvent

    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_SPEC_BYTES:
        raise SpecError([SpecProblem("", f"is {size:,} bytes long; at most {MAX_SPEC_BYTES:,} are accepted")])
    yaml = YAML(typ="safe", pure=True)
    yaml.allow_duplicate_keys = False
    try:
        # Aliases can make a small text expand without bound, and no spec needs them.
        depth = 0
        for event in yaml.parse(io.StringIO(text)):
            name = type(event).__name__
            depth += name.endswith("StartEvent") - name.endswith("EndEvent")
            if isinstance(event, AliasEvent):
                raise SpecError([SpecProblem("", f"uses an alias (*) at line {event.start_mark.line + 1}; write the value out")])
            if depth > MAX_DEPTH:
                raise SpecError([SpecProblem("", f"is nested deeper than {MAX_DEPTH} levels")])
        return yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SpecError([SpecProblem("", f"is not valid YAML{where}: {error.problem or error.context}")]) from None
    except SpecError:
        raise
    except (YAMLError, ValueError) as error:
        raise SpecError([SpecProblem("", f"is not valid YAML: {error}")]) from None


def load_yaml(text: str) -> RunSpec:
    """Parse and check a spec written as YAML. Raises `SpecError`, as `parse_yaml` and `load_spec` do."""
    data = parse_yaml(text)
    if data is None:
        raise SpecError([SpecProblem("", "is empty; start from `oppo spec example`")])
    return load_spec(data)


def dump_yaml(data: Any) -> str:
    """Plain data (a spec's `model_dump(mode="json")`) as YAML that `parse_yaml` reads back unchanged."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    out = io.StringIO()
    yaml.dump(data, out)
    return out.getvalue()


"""What workers of the wire version before get of a spec; `settings.txt` has the settings that f5bbdf8, of version 4, knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oppo_contract.retired import RETIRED
from oppo_contract.spec import PLATFORM_SECTIONS, RunSpec, load_spec
from oppo_contract.spec_versions import SETTINGS_ADDED_IN, spec_for_version
from oppo_contract.wire import WIRE_VERSION

KNOWN_TO_4 = set((Path(__file__).parents[1] / "fixtures/f5bbdf8/settings.txt").read_text().split())
# Their defaults may be empty from version 5 on.
EMPTY_SINCE_5 = {"overlap.chunk.size", "ppo.learning_rate", "ppo.critic_learning_rate"}
TREE: dict[str, Any] = {
    "name": "n", "steps": 4, "data": {"prompts": "letters"}, "evaluation": {"prompts": "letters"},
    "models": {"actor": {"tiny": {"context": 1024}}, "reward": {"rule": "letters:score"}},
}  # fmt: skip


def paths(defs: dict[str, Any], node: dict[str, Any], at: str = "") -> Iterator[str]:
    """Every setting of a JSON schema by its dotted path."""
    if "$ref" in node:
        yield from paths(defs, defs[node["$ref"].rpartition("/")[2]], at)
    for kind in ("anyOf", "oneOf", "allOf"):
        for part in node.get(kind, ()):
            yield from paths(defs, part, at)
    for name, part in node.get("properties", {}).items():
        path = f"{at}.{name}" if at else name
        yield path
        yield from paths(defs, part, path)
    for kind, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(node.get(kind), dict):
            yield from paths(defs, node[kind], at + suffix)


def lookup(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree[name]
    return tree


def test_the_table_has_every_setting_that_version_4_lacks() -> None:
    schema = RunSpec.model_json_schema()
    now = {path for path in paths(schema["$defs"], schema) if path.partition(".")[0] not in PLATFORM_SECTIONS}
    since_5 = {path for path, (version, _) in SETTINGS_ADDED_IN.items() if version == 5}
    assert now - KNOWN_TO_4 <= SETTINGS_ADDED_IN.keys(), "a new setting needs a row, or older workers reject every run"
    assert since_5 == (now - KNOWN_TO_4 | EMPTY_SINCE_5) & since_5, "a row for what version 4 knows"
    assert all(path.startswith(tuple(RETIRED)) for path in KNOWN_TO_4 - now), "an older worker gets no removed setting"


def test_the_defaults_are_the_specs() -> None:
    spec = load_spec(TREE).model_dump(mode="json")
    assert {path: lookup(spec, path) for path in SETTINGS_ADDED_IN} == {path: row[1] for path, row in SETTINGS_ADDED_IN.items()}


def test_an_older_worker_gets_newer_settings_only_if_they_are_set() -> None:
    spec = load_spec({**TREE, "ppo": {"tis_floor": 0.5, "learning_rate": 1e-4}}).model_dump(mode="json")
    before = load_spec(spec).model_dump(mode="json")
    older = spec_for_version(spec, 4)
    assert spec == before, "the run's own spec stays"
    assert older["ppo"]["tis_floor"] == 0.5
    assert older["ppo"]["learning_rate"] == 1e-4
    assert not {"tis_outside", "critic_learning_rate", "dynamic_sampling"} & older["ppo"].keys()
    assert "columns" not in older["data"]
    assert "columns" not in older["evaluation"]
    assert "size" not in older["overlap"]["chunk"]
    assert spec_for_version({**spec, "evaluation": None}, 4)["evaluation"] is None
    assert spec_for_version(spec, WIRE_VERSION) == spec

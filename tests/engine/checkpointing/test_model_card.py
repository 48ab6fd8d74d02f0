"""The model card of an exported actor: figures of the checkpoint, settings, licence of the base, how to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_contract.spec import load_spec
from oppo_contract.yaml_text import parse_yaml
from oppo_core.checkpointing.export import export_actor
from oppo_core.checkpointing.model_card import stated_licence


def test_it_says_what_was_trained_how_and_how_to_load_it(world: Any, oppo_run: Any, tmp_path: Path) -> None:
    checkpoint = sorted((oppo_run.out / "checkpoints").glob("step-*"))[-1]
    assert "README.md" in export_actor(checkpoint, tmp_path / "plain")
    card = (tmp_path / "plain" / "README.md").read_text()
    scores, spec = oppo_run.engine.run_score, oppo_run.engine.spec
    assert card.startswith('---\nlibrary_name: "oppo"\ntags: ["rlhf", "ppo"]\n---\n')
    assert f"# {spec.name}\n" in card
    assert f"| Steps | {oppo_run.engine.progress.step} of {spec.steps} |" in card
    assert f"| Mean reward of the last step | {scores.score:.4g} |" in card
    assert f"nats per response | {scores.kl:.4g} |" in card
    assert "last evaluation" not in card
    assert "Not known here" in card
    assert "models.actor: {path: FOLDER}" in card
    assert load_spec(parse_yaml(card.split("```yaml\n")[1].split("```")[0])) == spec


@pytest.mark.parametrize(
    ("readme", "licence"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model", "apache-2.0"),
        ("---\nlicense: 'mit'\n---", "mit"),
        ("# A model\nlicense: mit", ""),
        ("---\nlicense:\n- mit\n---", ""),
        ("---\nlicense: mit", ""),
    ],
)
def test_the_licence_that_the_base_states(tmp_path: Path, readme: str, licence: str) -> None:
    assert stated_licence(tmp_path) == stated_licence(None) == ""
    (tmp_path / "README.md").write_text(readme)
    assert stated_licence(tmp_path) == licence


def test_a_licence_file_is_named(world: Any, oppo_run: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "actor").mkdir(parents=True)
    (root / "actor" / "LICENSE").write_text("Do as you like.")
    checkpoint = sorted((oppo_run.out / "checkpoints").glob("step-*"))[-1]
    export_actor(checkpoint, tmp_path / "out", roots=[root])
    assert "See `LICENSE` in the base model's folder." in (tmp_path / "out" / "README.md").read_text()

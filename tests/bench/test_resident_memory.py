"""`bench/resident_memory.py` on a small model, whose processes take more than what it holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oppo_bench.gpu.cases import SHAPES
from oppo_bench.gpu.memory import write_models
from oppo_bench.studies import resident_memory
from oppo_contract.spec import load_spec


def test_every_case_is_a_valid_run(tmp_path: Path) -> None:
    for name, case in resident_memory.CASES.items():
        spec = load_spec(resident_memory.spec_of(tmp_path, tmp_path / "prompts.jsonl", case))
        assert spec.ppo.rows == case.get("rows", 16), name


@pytest.mark.full
def test_a_run_is_compared_with_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_models(SHAPES["tiny"], tmp_path)
    file = tmp_path / "memory.json"
    monkeypatch.setattr("sys.argv", ["resident_memory", str(tmp_path / "actor"), "--cases", "adapters", "--json", str(file)])
    resident_memory.main()
    written = json.loads(file.read_text())
    figures = {result["name"]: result["median"] for result in written["results"]}
    assert figures["adapters/planned_gb"] == pytest.approx(figures["adapters/peak_gb"], rel=0.5)
    assert figures["adapters/peak_gb"] > 0.3

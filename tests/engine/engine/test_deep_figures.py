"""`oppo spec check --deep --json`: the memory of a run whose devices are elsewhere, from shapes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oppo_cli.spec_commands import deep_figures
from oppo_core.engine.preflight import error_text, preflight
from tests.engine.engine.test_preflight import cli

ROOT = Path(__file__).parents[3]
LARGE = ROOT / "examples/large/ppo-7b-8x80gb.yaml"
GIB = 2**30
VLLM = {
    "rollout": {"backend": "vllm", "vllm_memory_share": 0.25}, "ppo": {"tis": "all"}, "resources": {"dtype": "bfloat16"},
}  # fmt: skip


def check_large(figures: Path, *options: object) -> tuple[int, str, dict[str, Any]]:
    """Exit status, output and figures of the check of the example for eight GPUs."""
    ran = cli("spec", "check", "--deep", "--root", ROOT, "--json", figures, *options, LARGE)
    return ran.returncode, ran.stdout + ran.stderr, json.loads(figures.read_text())


def test_four_7b_models_fit_eight_gpus(tmp_path: Path) -> None:
    """Their shape is Qwen2.5-7B's, 7,615,616,512 weights; each GPU has its part and the actor's copy that decodes."""
    status, printed, figures = check_large(tmp_path / "figures.json", "--device-gib", 80)
    assert status == 0, printed
    assert figures["memory/training/devices"] == 8
    assert figures["memory/largest_gib"] == figures["memory/training/gib"] <= 60
    assert (figures["memory/training/vllm_gib"], figures["memory/training/available_gib"]) == (0, 80)
    assert figures["memory/fits"] is True
    items = {name: size for name, size in figures.items() if name.startswith("memory/training/items/")}
    assert sum(items.values()) == pytest.approx(figures["memory/training/gib"], abs=0.01)
    assert items["memory/training/items/actor: weights"] == pytest.approx(2 * 7_615_616_512 / GIB, abs=1e-4)
    assert items["memory/training/items/actor: optimizer"] == pytest.approx(7_615_616_512 / GIB, abs=1e-4)
    assert "has no weights" in printed, "what this machine lacks is said"
    assert figures["remedy"] is None
    assert any("has no weights" in problem for problem in figures["problems"])


def test_gpus_that_are_too_small_have_a_remedy(tmp_path: Path) -> None:
    status, printed, figures = check_large(tmp_path / "figures.json", "--device-gib", 40)
    assert status == 2
    assert "each training device takes about" in printed
    assert "Remedy: set models.lora: {}" in printed
    assert (figures["memory/fits"], figures["remedy"]) == (False, {"models.lora": {}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs here are taken")
def test_a_run_on_gpus_is_estimated_where_there_are_none(world: Any) -> None:
    figures = deep_figures(preflight(world.spec({"resources": {"kind": "cuda"}}), [world.folder]))
    assert figures["memory/training/available_gib"] == 80
    assert "memory/training/items/the GPU's libraries" in figures


@pytest.mark.parametrize(("changes", "named"), [({}, True), (VLLM, False)])
def test_where_not_even_the_decoders_copy_fits_vllm_on_other_gpus_is_the_remedy(world: Any, changes: Any, named: bool) -> None:
    spec = world.spec({"resources": {"kind": "cuda"}, "models": {"lora": {}}}, changes)
    (shortage,) = [text for e in preflight(spec, [world.folder], device_bytes=GIB).errors if "most of it" in (text := str(e))]
    assert ("decode with vLLM on GPUs of its own" in shortage) == named
    assert "resources.dtype bfloat16" in shortage


def test_vllms_own_memory_is_apart(world: Any) -> None:
    shared = deep_figures(preflight(world.spec(VLLM), [world.folder], device_bytes=80 * GIB))
    assert shared["memory/training/vllm_gib"] == shared["memory/training/items/vLLM"] == 20
    assert shared["memory/largest_gib"] < 5
    apart = deep_figures(
        preflight(world.spec(VLLM, {"resources": {"devices": 3, "decoding_devices": 2}}), [world.folder], device_bytes=80 * GIB)
    )
    assert apart["memory/training/vllm_gib"] == apart["memory/decoding/gib"] == 0
    assert (apart["memory/decoding/devices"], apart["memory/decoding/vllm_gib"]) == (2, 20)
    assert apart["memory/largest_gib"] == apart["memory/training/gib"]


def test_scorers_have_a_group_of_their_own(world: Any) -> None:
    spec = world.spec({"resources": {"devices": 4, "scoring_devices": 2}})
    figures = deep_figures(preflight(spec, [world.folder], device_bytes=GIB))
    assert (figures["memory/training/devices"], figures["memory/scoring/devices"]) == (2, 2)
    assert figures["memory/largest_gib"] == max(figures["memory/training/gib"], figures["memory/scoring/gib"])


def test_a_folder_without_weights_cannot_be_trained(world: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((ROOT / "examples/large/qwen2.5-7b/config.json").read_text())
    findings = preflight(world.spec({"models": {"reference": {"path": str(tmp_path)}}}), [world.folder])
    assert any("reference: " in error_text(e) and "has no weights (safetensors)" in error_text(e) for e in findings.errors)


@pytest.mark.parametrize("option", [("--json", "figures.json"), ("--device-gib", "80")])
def test_figures_need_the_deep_check(option: tuple[str, str]) -> None:
    ran = cli("spec", "check", *option, LARGE)
    assert ran.returncode == 2
    assert "need --deep" in ran.stderr

"""`python bench/gpu`, tried without a GPU at tiny sizes: what it tells, and that it fails where something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from oppo_bench.engine.fixed_lengths import FixedLengthDeviceDecoder, PaddedDeviceDecoder, fix_vllm_lengths
from oppo_bench.engine.memory_options import LEVERS
from oppo_bench.engine.workload import write_prompts
from oppo_bench.gpu import check, command, figures, memory, random_models
from oppo_bench.gpu.cases import ON_GPU, SHAPES, SHORT, UPDATES, VARIANTS, Cell, plan_order, select_cells
from oppo_bench.gpu.floor import Ceilings, Work, floors, needs
from oppo_bench.gpu.racing import Race, Variant, all_on_one_device
from oppo_bench.gpu.random_models import ModelSet
from oppo_bench.gpu.step_profile import read
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.sequence import Sequence
from oppo_core.trace.gpu_stats import GpuStats
from scripts import gpu_wheels
from tests.fakes.vllm_async_engine import streaming

ROOT = Path(__file__).parents[2]
TINY = ["--device", "cpu", "--sizes", "tiny"]
# What a GPU machine does not need: torch, transformers and the wheels of scripts/gpu_wheels.py are enough.
ABSENT = ("ruamel", "orjson", "structlog", "rich", "click", "psutil", "pynvml", "peft", "accelerate", "django", "celery")
WITHOUT = f"""
import importlib.machinery, runpy, sys
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT} else super().find_spec(name, path, target)
sys.meta_path[:] = [Without if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""


def results(file: Path) -> dict[str, dict[str, Any]]:
    """The figures of a document by name."""
    return {result["name"]: result for result in json.loads(file.read_text())["results"]}


def without(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python that has none of `ABSENT`."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + program, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A short trial of two variants."""
    file = tmp_path_factory.mktemp("gpu") / "gpu.json"
    asked = ["--batches", "4", "--variants", "both", "--repetitions", "1", "--seconds", "60", "--profile", "--json", str(file)]
    assert command.main([*TINY, *asked]) == command.OK
    return results(file)


def test_a_variant_is_told_whole(tried: dict[str, dict[str, Any]]) -> None:
    for name in ("sequential", "both"):
        given = f"tiny/B4/{name}"
        assert tried[f"{given}/step_ms"]["median"] > 0
        assert 0 < tried[f"{given}/mfu"]["median"] < 1
        assert tried[f"{given}/to_floor"]["median"] > 1
        assert tried[f"{given}/busy"]["median"] + tried[f"{given}/bubble"]["median"] == pytest.approx(1)
        assert {f"{given}/to_floor/{stage}" for stage in ("decode", "score", "update_actor", "update_critic")} <= set(tried)
    assert tried["tiny/decode_step_ms/transformers"]["median"] > 0
    assert tried["tiny/B4/sequential/speedup"]["median"] == 1
    assert tried["tiny/B4/sequential/deferred_share"]["median"] == 0
    assert "tiny/B4/intra/step_ms" not in tried
    for setting in LEVERS:
        assert tried[f"tiny/B4/update/{setting}/ms_an_update"]["median"] > 0
    assert tried["tiny/B4/update/full-packed/peak_mb"]["median"] < tried["tiny/B4/update/off-padded/peak_mb"]["median"]


def test_a_profile_counts_kernels(tried: dict[str, dict[str, Any]]) -> None:
    for name in ("sequential", "both"):
        assert tried[f"tiny/B4/{name}/kernels"]["median"] > 100
        assert 0 < tried[f"tiny/B4/{name}/kernel_busy"]["median"] <= 1


def test_time_in_which_kernels_run_counts_once() -> None:
    def event(name: str, device: str, start: int, took: int) -> SimpleNamespace:
        given = {"name": name, "device_type": f"DeviceType.{device}", "start_ns": start, "duration_ns": took}
        return SimpleNamespace(
            is_user_annotation=lambda: False, **{key: lambda value=value: value for key, value in given.items()}
        )

    listed = [
        event("add", "CUDA", 5, 10),
        event("mul", "CUDA", 0, 10),
        event("add", "CUDA", 30, 10),
        event("cuLaunch", "CPU", 0, 3),
    ]
    found = read([*listed, event("aten::add", "CPU", 0, 99)], on_gpu=True)
    assert (found.count, found.seconds, found.busy) == (3, pytest.approx(40e-9), pytest.approx(25 / 40))
    assert [(calls.name, calls.count) for calls in found.kernels] == [("add", 2), ("mul", 1)]
    assert [calls.name for calls in found.host] == ["cuLaunch"]
    assert read([], on_gpu=True).busy == 0


def test_both_paths_are_checked(tried: dict[str, dict[str, Any]]) -> None:
    assert tried["tiny/check/greedy_differ_float32"]["median"] == 0
    for role in ("reward", "reference", "critic"):
        assert tried[f"tiny/check/streamed_{role}_float32"]["median"] < check.WORST
    assert tried["tiny/check/update_gradients_float32"]["median"] < check.WORST


def test_failed_check_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "WORST", -1.0)
    asked = [*TINY, "--batches", "4", "--variants", "sequential", "--repetitions", "1", "--seconds", "60"]
    assert command.main(asked) == command.WRONG
    assert "streamed reward against one pass" in capsys.readouterr().err


def test_skipped_variants_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*TINY, "--seconds", "0"]) == command.OK
    told = capsys.readouterr().out
    assert "left out: tiny/B4: no time left" in told
    assert "left out: tiny/B12: no time left" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_how_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == command.REFUSED
    assert "--device cpu --sizes tiny" in capsys.readouterr().err


def test_the_plan_has_what_was_asked_for() -> None:
    assert [cell.case for cell in ON_GPU] == ["0.5B/B32", "1.5B/B32", "0.5B/B112", "1.5B/B112", "7B/B32"]
    assert set(ON_GPU[0].variants) == set(VARIANTS)
    assert all("sequential" in cell.variants for cell in ON_GPU)
    planned = plan_order(select_cells(["0.5B", "1.5B"], None, None), updates=True)
    sizes = [cell.size for cell in planned]
    assert sizes == sorted(sizes)  # networks of one size at a time
    assert [cell.case for cell in planned if cell in UPDATES] == ["0.5B/B32", "1.5B/B32"]
    assert plan_order(list(ON_GPU), updates=False) == sorted(ON_GPU, key=lambda cell: list(SHAPES).index(cell.size))
    assert select_cells(["0.5B"], [112], ["both"]) == [Cell("0.5B", 112, ("sequential", "both"), ON_GPU[2].lengths)]
    # The published sizes: 0.49, 1.54 and 7.6 billion weights, the last with a second table of words.
    assert [round(SHAPES[name].parameters / 1e9, 2) for name in ("0.5B", "1.5B", "7B")] == [0.49, 1.54, 7.07]


def test_the_floor_is_the_larger_of_bytes_and_operations() -> None:
    size, work = SHAPES["0.5B"], Work([(8, 64)] * 32, rounds=64, decoded=2048)
    slow_memory, slow_cores = Ceilings(1e9, 1e18, None), Ceilings(1e18, 1e9, None)
    stages = needs(size, work)
    assert floors(stages, slow_memory, False)["decode"] == stages["decode"].bytes / 1e9
    assert floors(stages, slow_cores, False)["decode"] == stages["decode"].flops / 1e9
    assert stages["decode"].bytes > 64 * 2 * size.parameters  # weights once a round
    assert stages["update_actor"].flops == pytest.approx(6 * size.parameters * 32 * 72, rel=0.1)
    balanced = Ceilings(stages["decode"].bytes, stages["score"].flops, None)
    apart, together = floors(stages, balanced, False), floors(stages, balanced, True)
    assert together["step"] < apart["step"] == pytest.approx(sum(apart[stage] for stage in stages))


def test_the_lock_file_has_every_wheel_that_a_gpu_machine_needs() -> None:
    assert {line.partition("==")[0] for line in gpu_wheels.locked_packages()} == set(gpu_wheels.PACKAGES)


def test_answers_are_as_long_as_imposed_on_every_decoder(tmp_path: Path) -> None:
    cell = Cell("tiny", 4, tuple(VARIANTS), SHORT)
    load = cell.load("cpu")
    house = ModelSet(load, tmp_path / "roles", torch.device("cpu"))
    prompts, trained = write_prompts(tmp_path, SHORT.seed), {}
    with all_on_one_device():
        for name in ("sequential", "padded", "all"):
            entrant = Variant(name, Race(cell, load), house, prompts, tmp_path / name, 1)
            entrant.step(GpuStats(), torch.device("cpu"))
            trained[name] = entrant.contestant.journal.newest["spans"]["trained"]
            kinds = {"sequential": FixedLengthDeviceDecoder, "padded": PaddedDeviceDecoder, "all": FixedLengthDeviceDecoder}
            assert type(entrant.contestant.engine.decoder) is kinds[name]
            entrant.contestant.close()
    for rows in trained.values():
        assert len(rows) == 4
        assert all(length == SHORT.of(sequence_id) for sequence_id, _, length in rows)
    assert trained["padded"] == trained["sequential"]


def test_lengths_are_imposed_on_vllm(tmp_path: Path) -> None:
    """By what stands in for its engine; the real one has not been raced."""
    house = ModelSet(Cell("tiny", 4, ("vllm",), SHORT).load("cpu"), tmp_path / "roles", torch.device("cpu"))
    network, settings = house.networks["actor"], DecodeSettings(1, -1, 1.0, 16, 40, 4096)
    decoder = streaming(network, settings, None, interval=4, handles=False, sleeps=False)
    fix_vllm_lengths(SimpleNamespace(decoder=decoder), SHORT)  # type: ignore[arg-type]
    answers = [Sequence(number, 0, np.array([3, 4, 5])) for number in range(3)]
    decoder.begin(answers)
    while decoder.live:
        decoder.advance(8, 0)
    decoder.close()
    assert [answer.length for answer in answers] == [SHORT.of(number) for number in range(3)]
    house.write_weights()
    assert (tmp_path / "roles/actor/model.safetensors").exists()
    assert command.main([*TINY, "--variants", "vllm"]) == command.REFUSED


@pytest.mark.full
def test_the_whole_command_with_torch_transformers_and_pydantic_alone(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    program = "sys.argv[0] = 'bench/gpu'\nrunpy.run_path('bench/gpu', run_name='__main__')"
    done = without(program, *TINY, "--repetitions", "2", "--seconds", "120", "--json", str(file))
    assert done.returncode == 0, done.stderr
    told = results(file)
    assert {f"tiny/B4/{name}/speedup" for name in VARIANTS} <= set(told)
    assert told["tiny/check/greedy_differ_float32"]["median"] == 0
    for name in VARIANTS:
        assert f"\n{name} " in done.stdout


@pytest.mark.full
def test_memory_of_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the engine's command beside its estimate; without a GPU nothing is measured."""
    monkeypatch.setattr("sys.argv", ["gpu_memory", "--cases", "tiny", "--json", str(tmp_path / "memory.json")])
    assert memory.main() == 0
    assert results(tmp_path / "memory.json")["tiny/estimated_gb"]["median"] > 0
    assert "\ntiny " in capsys.readouterr().out


@pytest.mark.full
def test_adapters_and_bfloat16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What 7B is on a GPU, small."""
    monkeypatch.setitem(SHAPES, "tiny", replace(SHAPES["tiny"], dtype="bfloat16"))
    for module in (random_models, command, figures):
        monkeypatch.setattr(module, "ADAPTED", ("tiny",))
    monkeypatch.setattr(random_models, "UNTIED", ("tiny",))
    file = tmp_path / "gpu.json"
    asked = ["--batches", "4", "--variants", "both", "--repetitions", "1", "--seconds", "60", "--json", str(file)]
    assert command.main([*TINY, *asked]) == command.OK
    told = results(file)
    assert told["tiny/B4/both/step_ms"]["median"] > 0
    assert told["tiny/check/greedy_differ_float32"]["median"] == 0
    assert told["tiny/check/streamed_critic_bfloat16"]["median"] < check.MEAN
    assert "tiny/check/greedy_differ_bfloat16" in told

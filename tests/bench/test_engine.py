"""`oppo bench engine` measures what it says: the same work for every variant, imposed lengths, the format that others read."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner

from oppo_bench.document import Result, document
from oppo_bench.engine import workload
from oppo_bench.engine.command import noisy
from oppo_bench.engine.engine_runner import EngineRunner
from oppo_bench.engine.floor import STAGES
from oppo_bench.engine.memory import USABLE, EngineMemory, heats
from oppo_bench.engine.models import build_models, published_models, roles, write_model
from oppo_bench.engine.padding import GROUPING, in_order, unsorted
from oppo_bench.engine.race import Measured, Plan, race, to_results
from oppo_bench.engine.workload import FLOOR, SHAPES, VARIANTS, Lengths, Load, Size, build_spec, reshaped, write_prompts
from oppo_bench.machine_load import LoadMonitor, Machine
from oppo_cli.main import main
from oppo_core.models.microbatching import ragged_batches
from oppo_core.rollout.sequence import Sequence

LOAD = Load("T", Size.tiny(16, 1, 2), 4, Lengths(seed=3, median=6, longest=24), max_age=1, chunk=4)
# Names that DESIGN §6 promises to whoever reads the file.
PROMISED = {"padded", "sequential", "per_sequence", "intra", "inter", "both", "all", "floor"}
# One of each kind: processes take seconds to start.
RACED = ("padded", "sequential", "inter", "all", "floor")


def contestant(name: str, folder: Path, load: Load = LOAD) -> EngineRunner:
    """A variant, assembled in this process."""
    models, prompts = build_models(load.size, folder, load.lengths.seed), write_prompts(folder, load.lengths.seed)
    return EngineRunner(name, build_spec(load, VARIANTS[name], models, prompts), load.lengths, folder / name, 2)


def trained_in(variant: EngineRunner, steps: int) -> list[Sequence]:
    """The answers that the next `steps` steps train, in order."""
    trained: list[Sequence] = []
    own = variant.engine.experience

    def build(sequences: list[Sequence], *given: object) -> object:
        trained.extend(sequences)
        return own(sequences, *given)

    variant.engine.experience = build
    for _ in range(steps):
        variant.step()
    return trained


@pytest.fixture(scope="module")
def measured() -> Measured:
    """One small race."""
    said: list[str] = []
    result = race(LOAD, Plan(2, 1, 2, RACED), LoadMonitor(), said.append)
    assert said
    return result


@pytest.mark.full
def test_everything_promised_is_measured(measured: Measured) -> None:
    assert set(Plan(1, 1, 1).variants) >= PROMISED
    assert set(Plan(1, 1, 1).variants_on("cpu")) >= PROMISED
    named = {result.name: result for result in to_results(measured)}
    for variant in RACED:
        result = named[f"T/B4/{variant}/us_per_token"]
        assert result.unit == "us"
        assert result.n == 2
        assert 0 < result.min <= result.median <= result.max
    for variant in measured.blocks:
        assert 0 <= named[f"T/B4/{variant}/bubble"].median < 1
        assert 0 < named[f"T/B4/{variant}/decode_occupancy"].median <= 1
        assert named[f"T/B4/{variant}/us_per_step"].min > named[f"T/B4/{variant}/us_per_token"].min
    assert named["T/B4/sequential/speedup"].min == named["T/B4/sequential/speedup"].max == 1


@pytest.mark.full
def test_only_deferral_defers(measured: Measured) -> None:
    for name, blocks in measured.blocks.items():
        shares = [block.mean("deferred_share") for block in blocks]
        assert (max(shares) > 0) == (VARIANTS[name]["inter_step"] == "defer")


@pytest.mark.full
def test_without_deferral_what_is_decoded_is_trained(measured: Measured) -> None:
    for name in ("padded", "sequential"):
        assert [block.decoded_share for block in measured.blocks[name]] == [1.0, 1.0]


@pytest.mark.full
def test_the_floor_has_every_stage(measured: Measured) -> None:
    assert [set(costs) for costs in measured.floor] == [set(STAGES)] * 2
    assert min(cost for costs in measured.floor for cost in costs.values()) > 0


@pytest.mark.full
def test_the_document_is_what_others_read(measured: Measured, tmp_path: Path) -> None:
    written = json.loads(json.dumps(document("engine", Machine(2, 0.4, None), {"seed": 3}, to_results(measured))))
    assert set(written) == {"bench", "commit", "machine", "settings", "results"}
    assert written["machine"]["cpus"] == 2
    assert all(set(row) == {"name", "unit", "median", "min", "max", "n"} for row in written["results"])
    assert len({row["name"] for row in written["results"]}) == len(written["results"])


@pytest.mark.parametrize("name", ["padded", pytest.param("sequential", marks=pytest.mark.full), "all"])
def test_imposed_lengths_are_honoured_exactly(name: str, tmp_path: Path) -> None:
    variant = contestant(name, tmp_path)
    try:
        trained = trained_in(variant, 6)
    finally:
        variant.close()
    assert len(trained) == 6 * LOAD.batch
    assert len({s.sequence_id for s in trained}) == len(trained)
    assert {s.sequence_id: s.length for s in trained} == {s.sequence_id: LOAD.lengths.of(s.sequence_id) for s in trained}
    assert all(s.ended_by_eos for s in trained)


def test_padding_changes_no_token(tmp_path: Path) -> None:
    written = []
    for name in ("padded", "sequential"):
        variant = contestant(name, tmp_path)
        written.append({s.sequence_id: s.response for s in trained_in(variant, 4)})
        variant.close()
    assert written[0] == written[1]


def test_padded_rows_stay_until_the_longest_ends(tmp_path: Path) -> None:
    variant = contestant("padded", tmp_path)
    trained = trained_in(variant, 1)
    decoder = variant.engine.decoder
    variant.close()
    longest = max(s.length for s in trained)
    assert decoder.rounds == longest
    assert decoder.decoded == sum(s.length for s in trained)
    assert len(decoder.live) == LOAD.batch


def test_engines_that_wait_use_no_processor(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    waiting = contestant("both", tmp_path)
    working = contestant("sequential", tmp_path)
    waiting.step()
    (process,) = set(multiprocessing.active_children()) - before
    used = psutil.Process(process.pid).cpu_times()
    for _ in range(5):
        working.step()
    now = psutil.Process(process.pid).cpu_times()
    working.close()
    waiting.close()
    # Two of the clock's ticks.
    assert now.user + now.system - used.user - used.system <= 2 / os.sysconf("SC_CLK_TCK")


def test_lengths_depend_on_seed_and_sequence_alone() -> None:
    lengths = Lengths(seed=5)
    drawn = [lengths.of(number) for number in range(2000)]
    assert drawn == [Lengths(seed=5).of(number) for number in range(2000)]
    assert drawn != [Lengths(seed=6).of(number) for number in range(2000)]
    assert min(drawn) >= 1
    assert max(drawn) == 512
    assert 58 <= sorted(drawn)[1000] <= 70


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "lognormal"])
def test_other_shapes_have_the_same_bounds(shape: str) -> None:
    drawn = sorted(Lengths.read(5, shape).of(number) for number in range(2000))
    assert drawn[0] >= 1
    assert drawn[-1] <= 512
    assert 45 <= drawn[1000] <= 70
    assert sum(drawn[1800:]) > 0.3 * sum(drawn), "a natural tail"


def test_lengths_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("7\n300\n")
    assert {Lengths.read(0, str(file)).of(number) for number in range(50)} == {7, 300}
    for text in ("", "7 seven", "0", "513"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"lengths\.txt must contain"):
            Lengths.read(0, str(file))
    with pytest.raises(ValueError, match=r"normal is neither lognormal, pareto, bimodal nor"):
        Lengths.read(0, "normal")


def test_a_size_of_any_shape(tmp_path: Path) -> None:
    name, size = reshaped("S", {"hidden": 256, "layers": None, "vocab": 49_152})
    assert (name, size.hidden, size.inner, size.layers, size.vocab) == ("S-hidden256-vocab49152", 256, 1024, 2, 49_152)
    load = Load(name, size, 16, Lengths(0), extra=3)
    spec = build_spec(load, VARIANTS["both"], build_models(size, tmp_path, 0), tmp_path / "prompts.jsonl")
    assert spec.overlap.overcommit.max == 3
    with pytest.raises(ValueError, match="--hidden 100 must be a multiple of 8"):
        reshaped("S", {"hidden": 100})
    for arguments, words in (
        (["--hidden", "100"], "--hidden 100 must be a multiple of 8"),
        (["--batches", "8,32", "--overcommit", "9"], "--overcommit 9 is above batch 8"),
    ):
        refused = CliRunner().invoke(main, ["bench", "engine", *arguments])
        assert (refused.exit_code, words in refused.output) == (2, True), refused.output


def test_a_speed_up_that_varies_too_much_is_named() -> None:
    rows = [Result.of("S/B16/both/speedup", "ratio", [1.4, 1.5, 1.6]), Result.of("S/B16/intra/speedup", "ratio", [0.9, 1.0, 1.4])]
    (line,) = noisy([*rows, Result.of("S/B16/intra/us_per_token", "us", [1.0, 9.0])])
    assert line.startswith("S/B16/intra: the repetitions differ too much, 0.90 to 1.40 ×.")


def test_in_order_keeps_order_and_budget() -> None:
    assert in_order([5, 0, 3, 4, 1], budget=10) == [[0, 2], [3, 4]]
    assert in_order([5, 3], budget=2) == [[0], [1]]
    assert in_order([], budget=8) == []


def test_unsorted_ends_with_its_block() -> None:
    with unsorted():
        assert all(module.ragged_batches is in_order for module in GROUPING)
    assert all(module.ragged_batches is ragged_batches for module in GROUPING)


def test_every_size_and_variant_is_a_valid_spec(tmp_path: Path) -> None:
    for (name, size), device in product(workload.SIZES.items(), ("cpu", "cuda")):
        load = Load(name, size, 16, Lengths(0), device)
        for overlap in VARIANTS.values():
            spec = build_spec(load, overlap, roles({"path": "actor"}, {"path": "reward"}), tmp_path / "prompts.jsonl")
            assert spec.overlap.overcommit.max <= spec.ppo.batch_size // 2


def test_variants_run_in_heats_where_memory_is_small() -> None:
    engines = {name: EngineMemory(10, 6) for name in ("padded", "sequential", "both")}
    engines[FLOOR] = engines["sequential"].of_floor(2)
    names = [*engines]
    for usable, expected in (
        (10 * 3 + 30 + 12, [names]),  # the floor's two engines work at the same time, others one by one
        (10 * 3 + 30 + 11, [names[:3], [FLOOR]]),
        (10 * 2 + 6, [names[:2], ["both"], [FLOOR]]),
        (0, [[name] for name in names]),
    ):
        assert heats(engines, math.ceil(usable / USABLE)) == expected
    assert heats(engines, None) == [names]


def test_memory_of_an_engine_has_the_activations_of_a_pass(tmp_path: Path) -> None:
    models, prompts = build_models(LOAD.size, tmp_path, 0), write_prompts(tmp_path, 0)
    small, large = (
        EngineMemory.of(build_spec(replace(LOAD, size=replace(LOAD.size, micro_batch_tokens=tokens)), {}, models, prompts))
        for tokens in (600, 1200)
    )
    assert large.working == pytest.approx(2 * small.working, rel=0.05)
    assert small.held > 0


def test_the_large_sizes_have_the_parameters_of_their_models() -> None:
    assert workload.SIZES["G1"].parameters / 1e9 == pytest.approx(0.49, abs=0.01)
    assert workload.SIZES["G2"].parameters / 1e9 == pytest.approx(1.54, abs=0.01)


@pytest.mark.full
@pytest.mark.parametrize("name", ["padded", "both"])
def test_a_transformers_model_in_half_precision_is_raced_too(name: str, tmp_path: Path) -> None:
    # The shape of G1 in small: a vocabulary beyond the tokenizer's, fewer key heads than heads.
    size = Size(16, 1, 2, 1, 32, workload.VOCAB + 64, "qwen2", "bfloat16", 512)
    load = replace(LOAD, name="G", size=size)
    variant = contestant(name, tmp_path, load)
    try:
        trained = trained_in(variant, 3)
    finally:
        variant.close()
    assert {s.sequence_id: s.length for s in trained} == {s.sequence_id: load.lengths.of(s.sequence_id) for s in trained}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A folder in the form of SmolLM2's."""
    shape = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24,
        "vocab_size": workload.VOCAB,
    }  # fmt: skip
    folder = write_model("llama", shape, "lm", "float32", tmp_path / "small", 0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return folder


def test_a_published_model_is_raced_with_adapters(published: Path, tmp_path: Path) -> None:
    """Prompts and responses have the lengths that the option's help gives."""
    file = tmp_path / "bench.json"
    asked = ["bench", "engine", "--model", str(published), "--batches", "2", "--reps", "1", "--steps", "1", "--max-age", "1"]
    done = CliRunner().invoke(main, [*asked, "--variants", "both", "--threads", "1", "--json", str(file)])
    assert done.exit_code == 0, done.output
    written = json.loads(file.read_text())
    assert "small/B2/both/us_per_token" in {row["name"] for row in written["results"]}
    assert (written["settings"]["lengths"]["shortest"], written["settings"]["lengths"]["longest"]) == (20, 400)
    load = Load("small", workload.published_size(published), 2, Lengths(0).for_published_model(), model=published)
    rows = write_prompts(tmp_path, 0, load.prompt_tokens).read_text().splitlines()
    assert {len(json.loads(rows[n])["prompt"]) for n in (0, -1)} == {30, 200}
    models = published_models(published, tmp_path / "models", 0)
    spec = build_spec(load, VARIANTS["both"], models, tmp_path / "prompts.jsonl")
    assert (spec.models.lora and spec.models.lora.rank, spec.rollout.max_prompt_tokens) == (16, 200)
    drawn = sorted(load.lengths.of(number) for number in range(2000))
    assert (drawn[0], drawn[-1]) == (20, 400)
    assert 90 <= drawn[1000] <= 110


def test_what_a_published_model_replaces_is_refused(published: Path, tmp_path: Path) -> None:
    unreadable = tmp_path / "unreadable"
    unreadable.mkdir()
    shutil.copy(published / "config.json", unreadable)
    for asked, words in (
        (["--model", str(published), "--hidden", "64"], "--hidden does not go with --model"),
        (["--model", str(published), "--sizes", "S"], "--sizes does not go with --model"),
        (["--model", str(tmp_path)], "has no config.json of a model"),
        (["--model", str(unreadable), "--batches", "2"], "cannot be read as a model"),
    ):
        refused = CliRunner().invoke(main, ["bench", "engine", *asked])
        assert (refused.exit_code, words in " ".join(refused.output.split())) == (2, True), refused.output


def test_a_busy_machine_is_named() -> None:
    assert Machine(2, 0.1, 0.05).complaint is None
    assert "0.50 of 2" in str(Machine(2, 0.1, 0.5).complaint)
    assert Machine(2, 1.5, None).complaint is not None
    assert LoadMonitor().machine().cpus >= 1


def test_spread() -> None:
    assert Result.of("a", "us", [3.0, 1.0, 2.0]) == Result("a", "us", 2.0, 1.0, 3.0, 3)


def test_the_command_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    asked = ["bench", "engine", "--quick", "--reps", "1", "--steps", "1", "--max-age", "1", "--batches", "2", "--threads", "1"]
    done = CliRunner().invoke(main, [*asked, "--variants", "padded,sequential", "--json", str(file)])
    assert done.exit_code == 0, done.output
    names = {row["name"] for row in json.loads(file.read_text())["results"]}
    assert {"S/B2/sequential/us_per_token", "S/B2/padded/us_per_token"} <= names
    assert "sequential" in done.output


@pytest.mark.parametrize("asked", [["--sizes", "XL"], ["--variants", "fast"], ["--batches", "many"]])
def test_unknown_variant_is_refused(asked: list[str]) -> None:
    done = CliRunner().invoke(main, ["bench", "engine", *asked])
    assert done.exit_code == 2
    assert "There is no" in done.output


def test_a_missing_gpu_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(main, ["bench", "engine", "--device", "cuda", "--sizes", "S", "--variants", "sequential"])
    assert done.exit_code == 2
    assert "no GPU" in done.output

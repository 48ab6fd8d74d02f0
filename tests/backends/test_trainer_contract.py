"""What every training backend must do alike: plain, FSDP2, and DeepSpeed at its two stages, on two processes over gloo.

One pair of processes trains all runs, because reading DeepSpeed takes seconds. Select a backend by its id: `-k 'deepspeed and
zero1'`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM

from oppo_contract.events import parse_event
from oppo_contract.spec import TinyArchitecture
from oppo_core.models.model_io import save_tiny
from oppo_core.models.tiny_transformer import Head, init_tiny
from oppo_core.trace.gpu_stats import GB

Tree = dict[str, Any]
VOCAB = 40
ARCHITECTURE = TinyArchitecture(hidden=16, layers=2, heads=2, context=64, vocab=VOCAB)
PATIENCE_S = 420.0
HERE = Path(__file__).parent
BACKENDS: dict[str, Tree] = {"plain": {"backend": "plain"}, "fsdp2": {"backend": "fsdp2"}} | {
    f"deepspeed-zero{stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in (1, 2)
}
OFFLOADED = {"backend": "deepspeed", "zero_stage": 2, "offload": "optimizer"}
MISSING = "" if importlib.util.find_spec("deepspeed") else "deepspeed is not installed; `make deepspeed` installs it"
INSTALLED = [name for name, backend in BACKENDS.items() if not MISSING or backend["backend"] != "deepspeed"]
# Parts of a spec by the name of what they try.
ONE_PASS: Tree = {"ppo": {"mini_batches": 1, "epochs": 1}}
PASSES: Tree = {"ppo": {"mini_batches": 2, "epochs": 2, "micro_batch_tokens": 64, "max_grad_norm": 0.05}}
SHORT: Tree = {"resources": {"dtype": "bfloat16"}}
# One row in a mini-batch: one of two ranks has none.
FEW: Tree = {"ppo": {"batch_size": 2, "mini_batches": 2, "epochs": 2}}
TEXTS: Tree = {"ppo": {"pretraining": {"data": "texts.jsonl", "sequences": 2, "coefficient": 0.5}}}
ADAPTERS: Tree = {"models": {"lora": {"rank": 4, "alpha": 8, "critic": True}}}
LESS_MEMORY: Tree = {"packing": "on", "recompute": "full"}
HUGGING: Tree = {"models": {"actor": {"path": "qwen2"}, "critic": "actor"}}

each_backend = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.skipif(name not in INSTALLED, reason=MISSING)) for name in BACKENDS],
)


class Runs:
    """What came of the cases, by name."""

    def __init__(self, world: Path) -> None:
        self.world = world

    def result(self, name: str, rank: int = 0) -> Tree:
        """`steps`: metrics a step; `fault`; `moved`: how far a weight has moved at most."""
        found: Tree = json.loads((self.world / name / f"rank-{rank}.json").read_text())
        return found

    def weights(self, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
        """Both roles' weights at the end."""
        return load_file(self.world / name / f"rank-{rank}.safetensors")


def merged(base: Tree, *changes: Tree) -> Tree:
    """`base` with nested `changes` laid over it."""
    result = dict(base)
    for change in changes:
        for key, value in change.items():
            known = result.get(key)
            result[key] = merged(known, value) if isinstance(value, dict) and isinstance(known, dict) else value
    return result


def case(
    name: str,
    backend: Tree,
    *changes: Tree,
    nodes: int = 2,
    resume: str = "",
    fault: int | None = None,
    stop: int | None = None,
    read: bool = False,
) -> dict[str, Any]:
    """A run of three steps.

    Args:
        resume: a checkpoint, or a run whose newest checkpoint is meant.
        fault: the step in which rank 1's policy loss is not a number.
        stop: the chunk of an unfinished step after which rank 1 is asked to stop.
        read: whether each rank reads one row in the end (`sharded_reads`).
    """
    base: Tree = {
        "name": name, "seed": 3, "steps": 3, "data": {"prompts": "prompts.jsonl"}, "training": backend,
        "models": {"actor": {"path": "actor"}, "reward": {"model": {"path": "reward"}}, "critic": "reward"},
        "ppo": {"batch_size": 8, "learning_rate": 3e-3, "critic_learning_rate": 3e-3, "warmup_steps": 2},
        "rollout": {"max_new_tokens": 40, "max_prompt_tokens": 12},
        "overlap": {"intra_step": "off", "inter_step": "off"},
        "resources": {"nodes": nodes, "devices": nodes, "kind": "cpu", "longest_silence_s": 60},
        "checkpoints": {"every_steps": 2},
    }  # fmt: skip
    return {"name": name, "spec": merged(base, *changes), "resume": resume, "fault": fault, "stop": stop, "read": read}


def cases(backends: list[str]) -> list[dict[str, Any]]:
    """All runs that the tests look at; those that resume come after what they resume."""
    listed = [case("alone", BACKENDS["plain"], ONE_PASS, nodes=1), case("alone-few", BACKENDS["plain"], FEW, nodes=1)]
    for name in backends:
        backend = BACKENDS[name]
        listed += [
            case(f"{name}-one-pass", backend, ONE_PASS),
            case(f"{name}-passes", backend, PASSES, TEXTS),
            case(f"{name}-few", backend, FEW),
            case(f"{name}-fault", backend, PASSES, fault=1),
            case(f"{name}-short", backend, PASSES, SHORT),
            case(f"{name}-adapters", backend, PASSES, ADAPTERS),
            case(f"{name}-hugging", backend, PASSES, HUGGING),
            case(f"{name}-less", backend, PASSES, HUGGING, {"training": LESS_MEMORY}),
        ]
    for name in backends:
        listed += [
            case(f"{name}-resumes", BACKENDS[name], PASSES, TEXTS, resume=f"{name}-passes/checkpoints/step-00000002"),
            case(f"{name}-short-resumes", BACKENDS[name], PASSES, SHORT, resume=f"{name}-short/checkpoints/step-00000002"),
            case(f"{name}-takes-over", BACKENDS[name], PASSES, TEXTS, resume="plain-passes/checkpoints/step-00000002"),
            case(f"{name}-handed-on", BACKENDS["plain"], PASSES, TEXTS, resume=f"{name}-passes/checkpoints/step-00000002"),
            case(f"{name}-joined", BACKENDS[name], ONE_PASS, resume="alone/checkpoints/step-00000002"),
            case(f"{name}-left", BACKENDS["plain"], ONE_PASS, nodes=1, resume=f"{name}-one-pass/checkpoints/step-00000002"),
        ]
    return listed + ([] if MISSING else [case("offloaded", OFFLOADED, PASSES, TEXTS)])


def write_world(folder: Path) -> None:
    """Model folders, prompts and texts, small."""
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(VOCAB - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    heads: dict[str, Head] = {"actor": "lm", "reward": "scalar"}
    for seed, (name, head) in enumerate(heads.items()):
        generator, model = torch.Generator().manual_seed(seed), init_tiny(ARCHITECTURE, head, seed)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    weight.normal_(0.0, 0.3, generator=generator)
        save_tiny(model, folder / name, None, eos_token_id=2, pad_token_id=0)
        tokenizer.save(str(folder / name / "tokenizer.json"))
    write_qwen2(folder / "qwen2")
    tokenizer.save(str(folder / "qwen2" / "tokenizer.json"))
    for name, key, least in (("prompts", "prompt", 1), ("texts", "text", 3)):
        rows = [{key: [3 + (number * 7 + i * 5) % (VOCAB - 3) for i in range(least + number)]} for number in range(11)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_qwen2(folder: Path) -> None:
    """A small Hugging Face model whose output layer is its embedding."""
    torch.manual_seed(5)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCAB}
    config = Qwen2Config(**sizes, **tokens, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2)
    Qwen2ForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trained by one pair of processes, under every backend that is installed."""
    return train_cases(tmp_path_factory.mktemp("backends"), cases(INSTALLED), 2)


def train_cases(world: Path, listed: list[dict[str, Any]], processes: int, **environ: str) -> Runs:
    """Run the cases, one after the other, in so many processes, each a rank of those that have as many."""
    write_world(world)
    (world / "cases.json").write_text(json.dumps(listed))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)} | environ
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "one_rank.py"), str(world), str(rank)], env=environment,
            stdout=(world / f"output-{rank}").open("w"), stderr=subprocess.STDOUT,
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        ended = [process.wait(PATIENCE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert not any(ended), "\n".join((world / f"output-{rank}").read_text()[-3000:] for rank in range(processes))
    return Runs(world)


def close(tolerance: float) -> Callable[[Tree], Any]:
    """Metrics that are equal but for rounding."""
    return lambda metrics: pytest.approx(metrics, rel=tolerance, abs=tolerance, nan_ok=True)


def assert_alike(runs: Runs, name: str, other: str, tolerance: float = 1e-4, ranks: Iterable[int] = (0, 1)) -> None:
    """The ranks of `name` have ended with the weights of `other`.

    But for the biases of the keys: they change no softmax, so their gradients are rounding, of which AdamW makes steps too.
    """
    for rank in ranks:
        theirs = runs.weights(other)
        for key, weight in runs.weights(name, rank).items():
            if key.endswith("qkv.bias"):
                weight[ARCHITECTURE.hidden : -ARCHITECTURE.hidden] = theirs[key][ARCHITECTURE.hidden : -ARCHITECTURE.hidden]
            torch.testing.assert_close(weight, theirs[key], rtol=0, atol=tolerance, msg=lambda said, key=key: f"{key}: {said}")


@each_backend
@pytest.mark.parametrize(("way", "one"), [("one-pass", "alone"), ("few", "alone-few")])
def test_two_ranks_learn_what_one_process_does(runs: Runs, backend: str, way: str, one: str) -> None:
    """Also where one of them has no rows of a mini-batch (`few`)."""
    for rank in (0, 1):
        assert [close(1e-4)(step) for step in runs.result(one)["steps"]] == runs.result(f"{backend}-{way}", rank)["steps"]
    assert_alike(runs, f"{backend}-{way}", one)


@each_backend
def test_losses_and_norms_are_those_of_plain_where_ranks_have_unequal_passes_and_gradients_are_cut(
    runs: Runs, backend: str
) -> None:
    expected, found = runs.result("plain-passes")["steps"], runs.result(f"{backend}-passes")["steps"]
    assert len(found) == 3
    assert [close(1e-4)(step) for step in expected] == found
    assert all(step["actor/grad_norm"] > 0.05 and math.isfinite(step["critic/vf_loss"]) for step in found)
    assert_alike(runs, f"{backend}-passes", "plain-passes")


@each_backend
@pytest.mark.parametrize("way", ["resumes", "takes-over", "handed-on"])
def test_a_checkpoint_is_resumed_by_the_same_and_by_another_backend(runs: Runs, backend: str, way: str) -> None:
    expected, found = runs.result("plain-passes")["steps"], runs.result(f"{backend}-{way}")["steps"]
    assert [close(1e-4)(step) for step in expected[2:]] == found
    assert_alike(runs, f"{backend}-{way}", "plain-passes")


@each_backend
@pytest.mark.parametrize(("way", "ranks"), [("joined", 2), ("left", 1)])
def test_two_ranks_take_up_what_one_has_done_and_one_what_two_have(runs: Runs, backend: str, way: str, ranks: int) -> None:
    for rank in range(ranks):
        assert [close(1e-4)(step) for step in runs.result("alone")["steps"][2:]] == runs.result(f"{backend}-{way}", rank)["steps"]
    assert_alike(runs, f"{backend}-{way}", "alone", ranks=range(ranks))


@each_backend
def test_short_weights_go_on_to_the_bit_after_a_checkpoint_that_has_them_precisely(runs: Runs, backend: str) -> None:
    assert runs.result(f"{backend}-short-resumes")["steps"] == runs.result(f"{backend}-short")["steps"][2:]
    for name, weight in runs.weights(f"{backend}-short-resumes").items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, runs.weights(f"{backend}-short")[name]), name


@pytest.mark.parametrize("name", ["fsdp2-passes", "fsdp2-short", "plain-passes"])
def test_sharded_weights_are_handed_over_once_a_step(runs: Runs, name: str) -> None:
    """To the network that decodes, in the run's precision; the metric says how many bytes of weights these are."""
    sharded = name.startswith("fsdp2")
    for rank in (0, 1):
        lines = (runs.world / name / f"events-{rank}.jsonl").read_bytes().splitlines()
        events = [parse_event(line) for line in lines]
        phases = [phase for event in events if event.kind == "spans" for phase in event.phase]
        assert phases.count("weights") == (3 if sharded else 0)
        steps = [event.metrics for event in events if event.kind == "step"]
        assert len(steps) == (0 if rank else 3)
        size = sum(weight.nbytes for key, weight in runs.weights(name).items() if key.startswith("actor."))
        assert [step.get("perf/hand_over_gb") for step in steps] == [pytest.approx(size / GB) if sharded else None] * len(steps)


@each_backend
def test_a_fault_on_one_rank_ends_both_before_the_weights_are_harmed(runs: Runs, backend: str) -> None:
    for rank in (0, 1):
        result = runs.result(f"{backend}-fault", rank)
        assert result["fault"].startswith("rank 1: the policy loss is nan at step 2")
        assert len(result["steps"]) == 1
    assert all(torch.isfinite(weight).all() for weight in runs.weights(f"{backend}-fault").values())


@each_backend
def test_a_hugging_face_model_whose_weights_are_tied_learns_the_same(runs: Runs, backend: str) -> None:
    expected, found = runs.result("plain-hugging")["steps"], runs.result(f"{backend}-hugging")["steps"]
    assert [close(1e-4)(step) for step in expected] == found


@each_backend
def test_passes_that_keep_less_learn_the_same(runs: Runs, backend: str) -> None:
    expected, found = runs.result("plain-hugging")["steps"], runs.result(f"{backend}-less")["steps"]
    assert [close(1e-4)(step) for step in expected] == found


@each_backend
def test_low_rank_adapters_learn_the_same(runs: Runs, backend: str) -> None:
    expected, found = runs.result("plain-adapters")["steps"], runs.result(f"{backend}-adapters")["steps"]
    assert [close(1e-4)(step) for step in expected] == found
    assert found[0]["actor/grad_norm"] > 0
    assert_alike(runs, f"{backend}-adapters", "plain-adapters")


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_fsdp2_keeps_half_of_every_trained_weight_on_each_of_two_ranks(runs: Runs, role: str) -> None:
    shares = [runs.result("fsdp2-passes", rank)["kept"][role] for rank in (0, 1)]
    whole = runs.result("plain-passes")["kept"][role]
    assert sum(shares) == whole
    assert max(shares) < 0.6 * whole


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_deepspeed_zero2_learns_the_same_with_its_state_in_main_memory(runs: Runs) -> None:
    assert [close(1e-4)(step) for step in runs.result("plain-passes")["steps"]] == runs.result("offloaded")["steps"]
    assert_alike(runs, "offloaded", "plain-passes")


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_shards_moments_and_masters_and_with_stage_2_the_gradients(runs: Runs, stage: int) -> None:
    """As the estimate of memory has it: bytes of this rank's state."""
    trained = sum(runs.result("plain-passes")["kept"].values())
    for rank in (0, 1):
        held = runs.result(f"deepspeed-zero{stage}-passes", rank)["held"]
        expected = {"gradients": 4 * trained // stage, "moments": 8 * trained // 2, "masters": 4 * trained // 2}
        # Of gradients DeepSpeed keeps whole tensors, of which one is in both ranks' parts.
        assert {kind: pytest.approx(size, rel=0.2 if kind == "gradients" else 0.05) for kind, size in expected.items()} == held

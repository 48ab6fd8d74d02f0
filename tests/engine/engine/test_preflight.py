"""Preflight finds everything that stands in the way of the first step, at once; an exported actor is a plain folder."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from oppo_core.checkpointing.atomic_dir import CheckpointError
from oppo_core.checkpointing.export import export_actor
from oppo_core.engine import preflight as looked
from oppo_core.engine.preflight import PreflightError, error_text, preflight, require_preflight
from oppo_core.training.optimizer import tensor_bytes
from oppo_estimate.items import Role
from oppo_estimate.memory import checkpoint_bytes, decode_slots, memory_items
from oppo_estimate.shapes import Shape, read_shape

RULE = {"model": None, "rule": "letters:score"}


def bare(tree: Any) -> Any:
    """The spec without keys set to None, which a merge cannot remove."""
    tree["models"]["reward"] = {key: value for key, value in tree["models"]["reward"].items() if value is not None}
    return tree


def complaints(world: Any, *changes: Any) -> list[str]:
    return [
        error_text(error) for error in preflight(looked.RunSpec.model_validate(bare(world.tree(*changes))), [world.folder]).errors
    ]


def test_valid_run_has_no_preflight_problems(world: Any, tmp_path: Path) -> None:
    findings = preflight(world.spec({"evaluation": {"prompts": "echo.jsonl"}}), [world.folder], tmp_path)
    assert findings.errors == []
    (device,) = findings.memory
    assert 0 < device.needed < device.available


def test_all_complaints_come_at_once_each_with_what_to_do(world: Any, tmp_path: Path) -> None:
    wrong = {
        "models": {"actor": {"path": "actor"}, "reward": {"model": {"path": "other-tokens"}}, "critic": {"path": "lost"}},
        "data": {"prompt_field": "text"}, "rollout": {"max_new_tokens": 90}, "evaluation": {"prompts": "nowhere.jsonl"},
    }  # fmt: skip
    told = "\n".join(complaints(world, wrong))
    for words in (
        "lost does not exist", "tokenizer differs", "no 'text' (data.prompt_field); it has prompt",
        "nowhere.jsonl does not exist", "is 102; lower one of them",
    ):  # fmt: skip
        assert words in told
    with pytest.raises(PreflightError, match=r"\(1\) .*\(5\) "):
        require_preflight(world.spec(wrong), [world.folder], tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_missing_vllm_is_reported_with_a_remedy(world: Any) -> None:
    told = "\n".join(
        complaints(world, {"rollout": {"backend": "vllm"}, "ppo": {"tis": "all"}, "resources": {"dtype": "float32"}})
    )
    assert "rollout.backend is vllm, which is not installed here; install it (`pip install '.[gpu]'`, or on a CPU" in told
    served = {"models": {"reward": {"served_by": "vllm"}}, "resources": {"dtype": "float32"}}
    told = "\n".join(complaints(world, served))
    assert "models.reward.served_by is vllm, which is not installed here" in told
    assert "needs a model for sequence classification" in told  # one of our own architecture


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can")
@pytest.mark.parametrize(
    ("setting", "said"), [({"top_k": 5}, "no mask of top-k"), ({"vllm_sleep": True}, "cannot release memory")]
)
def test_what_vllm_needs_a_gpu_for_is_refused_without_one(world: Any, setting: Any, said: str) -> None:
    """Also where the spec leaves the kind of device open."""
    wanted = {"rollout": {"backend": "vllm", **setting}, "ppo": {"tis": "all"}, "resources": {"dtype": "float32"}}
    told = "\n".join(complaints(world, wanted))
    assert "torch sees no GPU here, and on a CPU vLLM" in told
    assert said in told


def test_an_actor_that_lies_on_a_hub_is_to_be_downloaded(world: Any) -> None:
    assert "hf download owner/name --local-dir MODELS_ROOT/name" in "\n".join(
        complaints(world, {"models": {"actor": {"path": "owner/name"}}})
    )


def test_what_loading_would_refuse_is_read_from_the_folder(world: Any, tmp_path: Path) -> None:
    """A reward model with two labels, a causal model as reward or classifier as actor, and a chat reward without a template."""
    sizes = {"model_type": "gpt2", "vocab_size": 40, "n_positions": 96, "n_embd": 16, "n_layer": 2, "n_head": 2}
    two_labels = {"id2label": {"0": "bad", "1": "good"}}
    one_label = {"id2label": {"0": "score"}}
    classifier = sizes | {"architectures": ["GPT2ForSequenceClassification"], "eos_token_id": 2}

    def folder(name: str, config: Any, **files: str) -> str:
        shutil.copytree(world.folder / "reward", tmp_path / name)
        for file, text in ({"config": json.dumps(config)} | files).items():
            (tmp_path / name / f"{file}.json").write_text(text)
        return str(tmp_path / name)

    def reward(path: str, reads: str = "tokens") -> list[str]:
        return complaints(world, {"models": {"reward": {"model": {"path": path}, "reads": reads}, "critic": "actor"}})

    (told,) = reward(folder("two", classifier | two_labels))
    assert told.endswith("two has 2 labels; a reward model has one")
    (told,) = reward(folder("default", classifier))
    assert "has 2 labels" in told
    (told,) = reward(folder("causal", classifier | {"architectures": ["GPT2LMHeadModel"]}))
    assert "causal is GPT2LMHeadModel, which has no trained head for scores; a reward model is a sequence classifier" in told
    (told,) = reward("actor")
    assert "actor is a language model without a head for scores" in told
    one = folder("one", classifier | one_label)
    assert reward(one) == reward(folder("chat", classifier | one_label, tokenizer_config='{"chat_template": "x"}'), "chat") == []
    (told,) = reward(one, "chat")
    assert "one has no chat template" in told
    assert "read: text needs none" in told
    told = "\n".join(complaints(world, {"models": {"actor": {"path": one}}}))
    assert "is a sequence classifier; the actor and the reference need a causal language model" in told
    (told,) = reward(folder("quantised", classifier | one_label | {"quantization_config": {"bits": 4}}))
    assert "its weights are quantised" in told


@pytest.mark.parametrize("kind", ["file", "folder", "pickle"])
def test_weights_of_another_format_are_refused_with_the_command_that_converts_them(world: Any, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "odd"
    place.mkdir()
    (place / "config.json").write_bytes((world.folder / "actor" / "config.json").read_bytes())
    name = "pytorch_model.bin" if kind == "pickle" else "m.gguf"
    (place / name).write_bytes(b"GGUF")
    given = place / name if kind == "file" else place
    found = f"{given} is a file" if kind == "file" else f"{given} has its weights in {name} only"
    tree = world.tree({"models": {"actor": {"path": str(given)}}, "overlap": {"intra_step": "off"}})
    said = f"{found}; a model is a folder with config.json and safetensors; convert it: oppo convert {given} FOLDER"
    assert said in "\n".join(complaints(world, tree))
    (tmp_path / "spec.yaml").write_text(json.dumps(tree))
    told = cli("spec", "check", "--deep", "--root", world.folder, tmp_path / "spec.yaml")
    assert (told.returncode, said in told.stderr, "Traceback" in told.stderr) == (2, True, False)
    status, events = world.main(tree, tmp_path / "run")
    assert (status, said in events[-1].reason) == (1, True)


def test_a_reason_names_its_roles_once(world: Any, tmp_path: Path) -> None:
    (told,) = complaints(world, {"models": {"actor": {"path": "gone"}, "critic": "actor"}})
    assert told == f"ModelFolderError: actor, reference, critic: gone does not exist here (looked in: {world.folder})"
    (told,) = complaints(world, {"models": {"reward": {"model": {"path": "lost"}}, "critic": "actor"}})
    assert told.startswith("ModelFolderError: reward 1: lost does not exist here")
    (told,) = complaints(world, {"models": {"reward": {"model": {"path": "other-tokens"}}, "critic": "actor"}})
    assert told.startswith("ModelFolderError: reward 1: the reward model's tokenizer differs")
    told = "\n".join(complaints(world, {"rollout": {"max_new_tokens": 90}}))
    assert "actor, reference, critic, reward 1: the context is 96 tokens, but" in told


def test_held_out_prompts_texts_and_stop_tokens_are_looked_at(world: Any, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text('{"question": [3, 4]}\n' + json.dumps({"question": [5] * 13}) + "\n")
    (tmp_path / "short.jsonl").write_text('{"text": [3]}\n')
    held_out = {"evaluation": {"prompts": str(tmp_path / "long.jsonl"), "prompt_field": "question"}}
    texts = {"ppo": {"pretraining": {"data": str(tmp_path / "short.jsonl")}}}
    told = complaints(world, held_out, texts, {"rollout": {"stop_tokens": [3, 40]}})
    for words in ("long.jsonl, line 2: the prompt has 13 tokens", "holds no text of two", "stop_tokens: [40] are outside"):
        assert any(words in line for line in told), words
    assert len(told) == 3
    (told,) = complaints(world, {"evaluation": {"prompts": "echo.jsonl", "prompt_field": "question"}})
    assert "no 'question' (evaluation.prompt_field); it has prompt" in told
    (told,) = complaints(world, {"ppo": {"pretraining": {"data": "gone.jsonl"}}})
    assert "gone.jsonl does not exist" in told
    (told,) = complaints(world, {"ppo": {"pretraining": {"data": "texts.jsonl", "field": "body"}}})
    assert "no 'body' (ppo.pretraining.field); it has text" in told


def test_several_devices_of_a_node_are_gpus_and_none_is_here(world: Any, tmp_path: Path) -> None:
    (told,) = complaints(world, {"resources": {"devices": 2}})
    assert told.startswith("LayoutError: resources.devices gives each node 2 devices, but torch sees no GPUs here")
    assert "resources.processes splits its cores" in told
    status, events = world.main(world.tree({"resources": {"devices": 2}}), tmp_path)
    assert (status, [event.kind for event in events]) == (1, ["finished"])
    assert "resources.devices gives each node 2" in events[0].reason


def test_a_rule_is_asked_about_one_sample(world: Any) -> None:
    (told,) = complaints(world, {"models": {"reward": RULE, "critic": "actor"}})
    assert told.startswith("RewardError: the rule letters:score, for sequence 0,")
    (told,) = complaints(world, {"models": {"reward": {"model": None, "rule": "nobody"}, "critic": "actor"}})
    assert "nobody" in told


def test_too_little_memory_is_told_with_the_largest_parts_and_the_remedy(world: Any) -> None:
    with mock.patch.object(looked, "_available", return_value=1000):
        findings = preflight(world.spec(), [world.folder])
        (shared,) = preflight(world.spec({"resources": {"kind": "cpu", "processes": 2}}), [world.folder]).errors
    (error,) = findings.errors
    for words in ("the run takes", "are free; most of it:", findings.memory[0].items[0].name, "lower ppo.micro_batch_tokens"):
        assert words in str(error)
    assert str(shared).startswith("each of the 2 processes on this machine takes about ")


def test_too_little_disk_is_told_before_the_run_starts(world: Any, tmp_path: Path) -> None:
    with mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=10)):
        (error,) = preflight(world.spec(), [world.folder], tmp_path / "run").errors
    assert "checkpoint takes about" in str(error)
    assert "lower checkpoints.keep" in str(error)


@pytest.mark.parametrize("intra", ["off", "per_sequence", "per_chunk"])
def test_sizes_are_those_of_the_real_thing(world: Any, tmp_path: Path, intra: str) -> None:
    """Weights, caches and checkpoint of an engine that was really built."""
    spec = world.spec({"steps": 1, "overlap": {"intra_step": intra}})
    engine = world.run(spec, tmp_path, inline=True).engine
    shape = read_shape(spec.models.actor, "lm", [world.folder])
    network = engine.actor.network
    assert shape is not None
    assert shape.weights == sum(p.numel() for p in network.parameters())
    findings = preflight(spec, [world.folder])
    by_name = {item.name: item.size for item in findings.memory[0].items}
    stores = [*engine.decoder.cache.keys, *engine.decoder.cache.values]
    streams = [engine.scorers.reference, engine.scorers.critic, *engine.scorers.reward.streams.values()]
    kept = [stream for stream in streams if sum(t.numel() for t in vars(stream)["_cache"].keys)]
    assert len(kept) == len([name for name in by_name if name.endswith("keys and values") and name != "actor: keys and values"])
    assert bool(kept) == (intra == "per_chunk")
    assert engine.decoder.cache.keys[0].shape[0] >= decode_slots(spec)
    assert by_name["actor: keys and values"] == pytest.approx(sum(s.numel() * s.element_size() for s in stores), rel=0.3)
    (event,) = [event for event in world_events(tmp_path) if event["kind"] == "checkpoint"]
    assert findings.checkpoint == pytest.approx(event["bytes"], rel=0.3)
    assert findings.checkpoint == checkpoint_bytes(spec, looked._roles(spec, [world.folder], looked.RefusedModels()))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_average_and_texts_are_counted(world: Any, tmp_path: Path, dtype: str) -> None:
    ppo = {"ema_decay": 0.9, "pretraining": {"data": "texts.jsonl"}}
    spec = world.spec({"steps": 1, "overlap": {"intra_step": "off"}, "ppo": ppo, "resources": {"dtype": dtype}})
    engine = world.run(spec, tmp_path).engine
    findings = preflight(spec, [world.folder])
    by_name = {item.name: item.size for item in findings.memory[0].items}
    actor = engine.actor
    assert by_name["actor: moving average"] == tensor_bytes(actor.average.state().values())
    assert by_name["texts that are mixed in"] == sum(ids.nbytes for ids in actor.mix.texts)
    (event,) = [event for event in world_events(tmp_path) if event["kind"] == "checkpoint"]
    assert findings.checkpoint == pytest.approx(event["bytes"], rel=0.3)


def test_estimate_counts_gpu_libraries_and_optimizer_temporaries(world: Any) -> None:
    spec = world.spec({"resources": {"dtype": "bfloat16"}, "ppo": {"micro_batch_tokens": 16}})
    shape = Shape(10**6, 2, 16, 40, 96, 64, inner_width=64)
    roles = [Role("actor", shape, 10**6), Role("reference", shape), Role("reward 1", shape, caches=False)]
    by_name = {item.name: item for item in memory_items(spec, roles, 9, gpu=80 * 2**30)}
    assert by_name["actor: gradients"].size == 4 * 10**6, "they are summed in float32"
    assert "actor: activations" in by_name, "a GPU's fused step makes nothing"
    assert by_name["actor: sampling"].size == 9 * 40 * (2 + 3 * 4 + 8)
    assert "reward 1: keys and values" not in by_name
    assert "reference: keys and values" in by_name
    on_a_cpu = {item.name: item for item in memory_items(spec, roles, 9)}
    assert on_a_cpu["actor: the optimizer's step"].size == 4 * 10**6
    assert "more than the activations before it" in on_a_cpu["actor: the optimizer's step"].arithmetic
    assert set(by_name) - set(on_a_cpu) == {"the GPU's libraries", "actor: activations"}
    larger = {
        item.name for item in memory_items(world.spec({"ppo": {"batch_size": 1200, "micro_batch_tokens": 10**5}}), roles, 9)
    }
    assert "actor: activations" in larger
    assert "actor: the optimizer's step" not in larger


def test_estimate_counts_what_vllm_takes(world: Any) -> None:
    shape = Shape(10**6, 2, 16, 40, 96, 64, inner_width=64)
    roles = [Role("actor", shape, 10**6), Role("reference", shape), Role("reward 1", shape, caches=False)]
    spec = world.spec({"resources": {"dtype": "bfloat16"}, "ppo": {"micro_batch_tokens": 16}})
    by_name = {item.name: item for item in memory_items(spec, roles, 9, gpu=80 * 2**30)}
    changed: dict[str, dict[str, Any]] = {
        "rollout": {"backend": "vllm", "vllm_memory_share": 0.25},
        "ppo": {"tis": "all"},
        "resources": {"dtype": "bfloat16"},
    }
    by_vllm = {item.name: item for item in memory_items(world.spec(changed), roles, 9, gpu=80 * 2**30)}
    assert by_vllm["vLLM"].size == 20 * 2**30
    assert {"actor: keys and values", "actor: sampling"} == by_name.keys() - by_vllm.keys()
    changed["rollout"]["vllm_sleep"] = True
    asleep = {item.name: item for item in memory_items(world.spec(changed), roles, 9, gpu=80 * 2**30)}
    assert asleep["vLLM"].size == 20 * 2**30 - asleep["actor: activations"].size
    assert "while vLLM sleeps" in asleep["vLLM"].arithmetic
    assert asleep["weights on their way to vLLM"].size == 2 * 2**28
    changed["rollout"]["vllm_sleep"] = False
    here = {item.name: item.size for item in memory_items(world.spec(changed), roles, 9)}
    assert here["vLLM: weights"] == 2 * 10**6
    assert {"vLLM: keys and values", "weights on their way to vLLM"} <= here.keys()
    assert "vLLM" not in here
    changed["models"] = {"reward": {"served_by": "vllm", "memory_share": 0.1}}
    read = {item.name: item.size for item in memory_items(world.spec(changed), roles, 9, gpu=80 * 2**30)}
    assert read["reward 1: vLLM"] == 8 * 2**30
    assert not {"reward 1: weights", "reward 1: keys and values"} & read.keys()
    changed["resources"] |= {"devices": 3, "decoding_devices": 2}
    assert "vLLM" not in {item.name for item in memory_items(world.spec(changed), roles, 9, gpu=80 * 2**30)}


def test_estimate_counts_the_evaluation_and_the_heads_in_float32(world: Any) -> None:
    """More rows are evaluated together than are in flight; a CPU multiplies by a float32 copy of a frozen bfloat16 head."""
    shape = Shape(10**6, 2, 16, 1000, 96, 64, inner_width=64)
    roles = [Role("actor", shape, 10**6), Role("reference", shape)]
    many = {"rollout": {"max_prompt_tokens": 16, "max_new_tokens": 16}, "evaluation": {"prompts": "p.jsonl", "count": 512}}
    items = {item.name: item.arithmetic for item in memory_items(world.spec(many), roles, 9)}
    assert items["actor: sampling"].startswith("512 rows × 1,000 words")
    vllm = world.spec(many, {"rollout": {"backend": "vllm"}, "ppo": {"tis": "all"}, "resources": {"dtype": "bfloat16"}})
    assert "evaluation: sampling" in {item.name for item in memory_items(vllm, roles, 9, gpu=80 * 2**30)}
    low = world.spec({"resources": {"dtype": "bfloat16"}})
    heads = {item.name: item.size for item in memory_items(low, roles, 9) if "head" in item.name}
    assert heads == {"reference: head in float32": 1000 * 16 * 4}
    adapted = world.spec({"resources": {"dtype": "bfloat16"}, "models": {"lora": {}}})
    shared = [Role("actor", shape, 10**4), Role("reference", shape, own=False)]
    assert [item.name for item in memory_items(adapted, shared, 9) if "head" in item.name] == ["actor: head in float32"]
    assert not [item for item in memory_items(low, roles, 9, gpu=80 * 2**30) if "head" in item.name]


def test_a_pass_holds_no_more_than_the_rows_of_a_mini_batch(world: Any) -> None:
    """SmolLM2-135M, both models trained in float32 with default settings of the PPO step, fits into 24 GB."""
    shape = Shape(134_515_008, 30, 576, 49_152, 8192, 2 * 30 * 3 * 64)
    small = {"rollout": {"max_prompt_tokens": 32, "max_new_tokens": 24}, "resources": {"dtype": "float32"}}
    ppo = {"batch_size": 16, "micro_batch_tokens": 8192}
    roles = [
        Role("actor", shape, shape.weights),
        Role("reference", shape),
        Role("critic", shape, shape.weights),
        Role("reward 1", shape),
    ]

    def activations(*changes: Any) -> str:
        items = {item.name: item for item in memory_items(world.spec(small, {"ppo": ppo}, *changes), roles, 24)}
        return str((items.get("actor: activations") or items["actor: the optimizer's step"]).arithmetic)

    assert sum(item.size for item in memory_items(world.spec(small, {"ppo": ppo}), roles, 24)) < 15 * 10**9
    assert activations().startswith("896 tokens ×")
    assert activations().endswith("(896 tokens a pass: 16 rows of a mini-batch × 56 tokens of prompt and response)")
    assert "(448 tokens a pass: 8 rows" in activations({"ppo": {"mini_batches": 2}})
    # A mini-batch may be one rank's, which has at most its share of the batch.
    assert "(448 tokens a pass: 8 rows" in activations({"ppo": {"mini_batches": 2}, "resources": {"kind": "cpu", "processes": 2}})
    sequential = {"resources": {"kind": "cpu", "processes": 4}, "overlap": {"intra_step": "off", "inter_step": "off"}}
    assert "(224 tokens a pass: 4 rows" in activations({"ppo": {"mini_batches": 2}}, sequential)
    # With one row in a mini-batch the largest pass is that of the log-probs before the update, over the whole batch.
    one_row = {"ppo": {"mini_batches": 16}}
    assert activations(one_row).endswith("384 tokens × 49,152 × 12 B (a pass of the proximal log-probs over 16 rows)")
    assert "384 tokens × 49,152 × 12 B (a pass" in activations(one_row, {"training": {"recompute": "head"}})
    assert activations({"ppo": {"micro_batch_tokens": 500}}).endswith("(500 tokens a pass: ppo.micro_batch_tokens)")
    texts = {"ppo": {"pretraining": {"data": "texts.jsonl", "sequences": 8, "max_tokens": 256}}}
    assert activations(texts).endswith("(2,048 tokens a pass: 8 texts × 256 tokens (ppo.pretraining))")
    two = {"ppo": {"micro_batch_tokens": 500}, "training": {"retained_passes": 4}}
    assert activations(two).endswith("(2 passes of 500 tokens a pass: ppo.micro_batch_tokens)")


def test_copies_for_decoding_count_as_far_as_the_update_needs_less_memory(world: Any) -> None:
    """They exist during decoding on a CPU in float32, the activations of the update after it."""

    def copies(weights: int, gpu: int = 0, dtype: str = "float32", tied: bool = True) -> int:
        spec = world.spec({"resources": {"kind": "cpu", "dtype": dtype}})
        shape = Shape(weights, 2, 16, 10**6, 96, 64, inner_width=64, tied=tied)
        items = {item.name: item.size for item in memory_items(spec, [Role("actor", shape, 0)], 9, gpu=gpu)}
        return items.get("actor: weights for decoding", 0)

    assert copies(10**8) == 4 * 10**8
    assert copies(3 * 10**6) == 12 * 10**6
    assert copies(10**8, tied=False) == 4 * (10**8 - 16 * 10**6)  # the embedding is not multiplied
    assert copies(2 * 10**6) == copies(10**8, gpu=80 * 2**30) == copies(10**8, dtype="bfloat16") == 0
    spec = world.spec({"resources": {"kind": "cpu"}})
    shape = Shape(10**8, 2, 16, 10**4, 96, 64, inner_width=64, tied=True)
    items = {item.name: item.size for item in memory_items(spec, [Role("actor", shape, 10**8)], 9)}
    transient = items.get("actor: activations", 0) + items.get("actor: the optimizer's step", 0)
    assert items.get("actor: weights for decoding", 0) == max(0, 4 * 10**8 - transient)


def test_a_node_keeps_its_part_of_what_deepspeed_cuts_up(world: Any) -> None:
    def sizes(stage: int, on_gpu: bool = False, **training: Any) -> dict[str, int]:
        changes = {"resources": {"nodes": 2, "devices": 2, "dtype": "bfloat16"}}
        spec = world.spec(changes, {"training": {"backend": "deepspeed", "zero_stage": stage} | training})
        role = Role("actor", Shape(10**6, 2, 16, 40, 96, 64, inner_width=64), 10**6)
        return {item.name: item.size for item in memory_items(spec, [role], 9, gpu=80 * 2**30 if on_gpu else 0)}

    assert [sizes(stage)["actor: gradients"] for stage in (1, 2)] == [4 * 10**6, 2 * 10**6]
    assert [sizes(stage)["actor: optimizer"] for stage in (1, 2)] == [6 * 10**6] * 2
    assert "actor: optimizer" in sizes(2, offload="optimizer")
    assert "actor: optimizer" not in sizes(2, on_gpu=True, offload="optimizer")


def test_a_rank_keeps_its_part_of_what_fsdp2_cuts_up(world: Any) -> None:
    changes = {"resources": {"kind": "cpu", "processes": 2, "dtype": "bfloat16"}, "training": {"backend": "fsdp2"}}
    shape = Shape(10**6, 2, 16, 40, 96, 64, inner_width=64)
    roles = [Role("actor", shape, 10**6), Role("reward 1", shape), Role("reference", shape), Role("critic", shape, 10**6)]
    sizes = {item.name: item.size for item in memory_items(world.spec(changes), roles, 9)}
    decoding = {"actor: weights", "actor: keys and values", "actor: sampling"}
    trained = {"sharded weights": 2 * 10**6, "gradients": 2 * 10**6, "optimizer": 4 * 10**6}
    for name in ("actor", "critic"):
        assert {part: sizes[f"{name}: {part}"] for part in trained} == trained
    assert sizes["actor: weights"] == 2 * 10**6
    assert sizes["reference: sharded weights"] == sizes["reward 1: sharded weights"] == 10**6
    shards = {name for name in sizes if name.endswith(("sharded weights", "gradients", "optimizer"))}
    assert sizes["reference: head in float32"] == 40 * 16 * 4
    # Moments, masters and the critic's weights a rank; the first one copies the actor's weights too.
    copies = {"actor: copies for a checkpoint": 6 * 10**6 + 2 * 10**6, "critic: copies for a checkpoint": 7 * 10**6}
    assert {name: sizes[name] for name in copies} == copies
    (largest,) = sizes.keys() - shards - decoding - copies.keys() - {"reference: head in float32", "freed activations"}
    assert (largest, sizes[largest]) == ("actor: gradients of a unit", 640 * 4 + (10**6 - 640) // 2 * 10)


def world_events(out: Path) -> list[Any]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oppo_cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_prints_the_arithmetic_or_every_complaint(world: Any, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(json.dumps(world.tree()))
    (tmp_path / "bad.yaml").write_text(
        json.dumps(world.tree({"data": {"prompts": "lost"}, "models": {"critic": {"path": "gone"}}}))
    )
    good = cli("spec", "check", "--deep", "--root", world.folder, tmp_path / "good.yaml")
    assert good.returncode == 0, good.stderr
    for words in ("actor: weights", "rows ×", "total memory", "checkpoint", "of 12 (rollout.max_prompt_tokens)"):
        assert words in good.stdout
    bad = cli("spec", "check", "--deep", "--root", world.folder, tmp_path / "bad.yaml")
    assert bad.returncode != 0
    for words in ("lost does not exist", "gone does not exist"):
        assert words in bad.stdout + bad.stderr


def test_an_exported_actor_is_a_folder_that_transformers_loads(world: Any, tmp_path: Path) -> None:
    """A small GPT-2 with a tokenizer, trained for a step."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    source = tmp_path / "gpt2"
    config = GPT2Config(
        vocab_size=40, n_positions=96, n_embd=16, n_layer=2, n_head=2, eos_token_id=2, bos_token_id=1, pad_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(source)
    shutil.copyfile(world.folder / "actor" / "tokenizer.json", source / "tokenizer.json")
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    spec = world.spec({
        "steps": 1, "models": {"actor": {"path": str(source)}, "critic": "actor"}, "overlap": {"intra_step": "off"},
        "resources": {"dtype": "float32"},
    })  # fmt: skip
    run = world.run(spec, tmp_path / "run")
    checkpoint = run.out / "checkpoints" / "step-00000001"
    told = cli("export", checkpoint, tmp_path / "plain")
    assert told.returncode == 0, told.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    trained = run.engine.actor.network
    tokens = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        ours = trained.logits(trained.hidden(tokens, torch.arange(4)[None]))
        torch.testing.assert_close(model(tokens).logits, ours, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "plain")("w0 w1")["input_ids"] == [3, 4]
    with pytest.raises(CheckpointError, match="exists already"):
        export_actor(checkpoint, tmp_path / "plain")
    (checkpoint / "actor" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json is missing or damaged"):
        export_actor(checkpoint, tmp_path / "other")

"""Every error in a spec names the field, the value, the allowed values and the nearest valid key."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oppo_contract import SpecError, SpecProblem, load_spec
from oppo_contract.spec import MAX_SPEC_BYTES
from oppo_contract.spec_errors import MAX_PROBLEMS
from oppo_contract.yaml_text import load_yaml, parse_yaml

CHOICE = "is not one of the choices"
WHOLE = "is not an integer"

GRPO, RLOO = ({"algorithm": name, "group_size": 4} for name in ("grpo", "rloo"))
# (path of the change, the value put there, complaint's path, message, shown value, allowed (a part of it), suggestion)
CASES = [
    # Unknown keys: at every level, in any case, with the nearest valid key.
    ("sede", 1, "sede", "unknown key", "1", "one of budget, ", "seed"),
    ("Seed", 1, "Seed", "unknown key", "1", "seed", "seed"),
    ("ModelSpec", 1, "ModelSpec", "unknown key", "1", "models", "models"),
    ("literal[1]", 1, "literal[1]", "unknown key", "1", "seed", None),
    ("", 1, "", "unknown key", "1", "seed", None),
    ("ppo.kl.coeficient", 1, "ppo.kl.coeficient", "unknown key", "1", "one of coefficient, ", "coefficient"),
    ("models.actor.pth", "x", "models.actor.pth", "unknown key", '"x"', "one of path, tiny", "path"),
    ("models.reward.model.Path", "x", "models.reward.model.Path", "unknown key", '"x"', "one of path, tiny", "path"),
    # Kinds: nothing is coerced.
    ("seed", "1", "seed", WHOLE, '"1"', "an integer, 0 to 2147483647", None),
    ("seed", 1.5, "seed", WHOLE, "1.5", "an integer", None),
    ("seed", True, "seed", WHOLE, "true", "an integer", None),
    ("seed", None, "seed", WHOLE, "null", "an integer", None),
    ("ppo.gamma", "high", "ppo.gamma", "is not a number", '"high"', "a number, 0 to 1", None),
    ("name", 7, "name", "is not text", "7", "1 to 120", None),
    ("data.shuffle", "yes", "data.shuffle", "is not true or false", '"yes"', "true or false", None),
    ("ppo", 3, "ppo", "is not a mapping", "3", "a mapping with algorithm, batch_size", None),
    ("models.actor", "gpt", "models.actor", "is not a mapping", '"gpt"', "a mapping with path, tiny", None),
    ("overlap.chunk.candidates", 8, "overlap.chunk.candidates", "is not a list", "8", "a list of 2 to 5 items", None),
    ("overlap.chunk.candidates", [8, "x"], "overlap.chunk.candidates.1", WHOLE, '"x"', "an integer, 1 or more", None),
    # Ranges.
    ("steps", 0, "steps", "is too small", "0", "an integer, 1 to 10000000", None),
    ("ppo.learning_rate", 0, "ppo.learning_rate", "is too small", "0", "above 0", None),
    ("ppo.learning_rate", 2.0, "ppo.learning_rate", "is too large", "2.0", "at most 1", None),
    ("ppo.gamma", float("nan"), "ppo.gamma", "is not finite", "NaN", "a number, 0 to 1", None),
    ("budget.max_hours", float("inf"), "budget.max_hours", "is not finite", "Infinity", "null", None),
    ("overlap.chunk.candidates", [8], "overlap.chunk.candidates", "has too few items", "[8]", "2 to 5 items", None),
    ("overlap.chunk.candidates", [8] * 6, "overlap.chunk.candidates", "has too many items", None, "2 to 5 items", None),
    ("name", "", "name", "is too short", '""', "1 to 120", None),
    ("name", "x" * 121, "name", "is too long", None, "1 to 120", None),
    ("name", "a\nb", "name", "contains characters that are not allowed", None, "on one line", None),
    ("name", " a", "name", "contains characters that are not allowed", '" a"', "without a space", None),
    ("name", "a\u202eb", "name", "contains characters that are not allowed", None, "on one line", None),
    ("models.reward.rule", "Rule", "models.reward.rule", None, '"Rule"', "a registered rule", None),
    ("models.actor", {"tiny": {"hidden": 65}}, "models.actor.tiny.hidden", None, "65", "8 to 2048, a multiple of 8", None),
    # Choices, also where a word or a mapping is allowed: one complaint, for what was meant.
    ("overlap.inter_step", "defr", "overlap.inter_step", CHOICE, '"defr"', "one of off, defer", "defer"),
    ("overlap.inter_step", False, "overlap.inter_step", CHOICE, "false", "one of off, defer", None),
    ("ppo.kl.estimator", "K3", "ppo.kl.estimator", CHOICE, '"K3"', "one of k1, k2, k3, k3+", "k3"),
    ("version", 2, "version", CHOICE, "2", "1", None),
    ("models.critic", "rewrd", "models.critic", CHOICE, '"rewrd"', "one of reward, actor, or a mapping with path", "reward"),
    ("models.critic", [1], "models.critic", CHOICE, "[1]", "or a mapping", None),
    ("models.critic", None, "models.critic", CHOICE, "null", "or a mapping", None),
    ("models.critic", {"path": "x", "tny": 1}, "models.critic.tny", "unknown key", "1", "one of path, tiny", "tiny"),
    ("models.critic", {"path": ""}, "models.critic.path", "is too short", '""', "text of 1 to 1024 characters", None),
    ("models.critic", {"tiny": {"layers": 0}}, "models.critic.tiny.layers", "is too small", "0", "1 to 64", None),
    ("models.critic", {}, "models.critic", "give exactly one of path and tiny", None, "path or tiny", None),
    # Values that are fine alone but not together.
    ("models.actor", {"path": "a", "tiny": {}}, "models.actor", None, '["path", "tiny"]', "path or tiny", None),
    ("models.reward", {}, "models.reward", None, "[]", "model, rule, http or parts", None),
    ("models.actor", {"tiny": {"heads": 5}}, "models.actor.tiny.heads", None, "5", "a divisor of 64", None),
    ("models.actor", {"tiny": {}}, "models.actor.tiny.context", None, "512", "768 or more", None),
    ("ppo.mini_batches", 5, "ppo.mini_batches", None, "5", "a divisor of 16, the nearest is 4", None),
    ("ppo.algorithm", "grpo", "ppo.group_size", "does not fit algorithm grpo", "1", "2 or more", None),
    ("ppo.group_size", 4, "ppo.group_size", "does not fit algorithm ppo", "4", "1", None),
    ("ppo.normalize_advantages_by_std", False, "ppo.normalize_advantages_by_std", None, "false", "true (the default)", None),
    ("ppo", {**GRPO, "critic_learning_rate": 1e-3}, "ppo.critic_learning_rate", None, "0.001", "null (the default)", None),
    ("ppo", {**GRPO, "gamma": 0.9}, "ppo.gamma", "has no effect with algorithm grpo", "0.9", "1.0 (the default)", None),
    ("ppo", {**GRPO, "value_clip_range": None}, "ppo.value_clip_range", None, "null", "0.2 (the default)", None),
    ("ppo", {**GRPO, "whiten_rewards": True}, "ppo.whiten_rewards", None, "true", "false (the default)", None),
    ("ppo", {**RLOO, "normalize_advantages_by_std": False}, "ppo.normalize_advantages_by_std", None, "false", "true (the", None),
    ("ppo", {**GRPO, "batch_size": 6, "mini_batches": 4}, "ppo.mini_batches", None, "4", "a divisor of 6", None),
    ("resources.nodes", 2, "resources.devices", None, "1", "2, or another multiple of it", None),
    ("resources", {"nodes": 20, "devices": 20}, "ppo.batch_size", None, "16", "20 or more", None),
    ("resources", {"processes": 17, "kind": "cpu"}, "ppo.batch_size", None, "16", "17 or more", None),
    ("resources", {"devices": 2, "kind": "cpu"}, "resources.devices", None, "2", "1; resources.processes", None),
    ("resources.processes", 2, "resources.processes", None, "2", "1, or empty, or kind cpu", None),
    ("resources.processes", 0, "resources.processes", None, "0", "1 to 256", None),
    ("overlap.overcommit.max", 17, "overlap.overcommit.max", "is above ppo.batch_size", "17", "at most 16", None),
    ("overlap.overcommit.initial", 9, "overlap.overcommit.initial", None, "9", "0 to 8", None),
    ("overlap.overcommit.min", 17, "overlap.overcommit.min", None, "17", "at most max, 16", None),
]  # fmt: skip


def change(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `data` with `value` at the dotted `path`."""
    changed = copy.deepcopy(data)
    *sections, key = path.split(".")
    at = changed
    for section in sections:
        at = at.setdefault(section, {})
    at[key] = value
    return changed


def refused(data: Any) -> list[SpecProblem]:
    """The problems of invalid data."""
    with pytest.raises(SpecError) as caught:
        load_spec(data)
    return caught.value.problems


def complaints(check: Callable[[], object]) -> list[SpecProblem]:
    """The problems found by `check`; empty if there are none."""
    try:
        check()
    except SpecError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("path", "value", "where", "message", "shown", "allowed", "suggestion"),
    CASES,
    ids=[f"{n}-{case[2]}" for n, case in enumerate(CASES)],
)
def test_one_error_per_mistake(
    minimal: dict[str, Any],
    path: str,
    value: Any,
    where: str,
    message: str | None,
    shown: str | None,
    allowed: str,
    suggestion: str | None,
) -> None:
    (problem,) = refused(change(minimal, path, value))
    assert problem.path == where
    assert message in (None, problem.message)
    assert shown in (None, problem.value)
    assert problem.value is not None
    assert allowed in (problem.allowed or "")
    assert problem.suggestion == suggestion
    for part in (where, problem.message, problem.value):
        assert part in str(problem)


# A setting, a value without effect, and the switch that gives it one.
IDLE = [
    ("overlap.kv_after_update", "keep", {"overlap.inter_step": "off"}, {"overlap.inter_step": "defer"}),
    ("overlap.kv_after_update", "keep", {"overlap.inter_step": "tail_batch"}, {}),
    ("ppo.tis_cap", 1.5, {"ppo.tis": "off"}, {}),
    ("ppo.final_rate", 0.5, {}, {"ppo.schedule": "linear"}),
    ("ppo.final_rate", 0.0, {}, {"ppo.critic_schedule": "cosine"}),
    ("ppo.length_penalty_from", 10, {}, {"ppo.length_penalty": 0.1}),
    ("ppo.nonfinite_limit", 5, {}, {"ppo.on_nonfinite": "skip"}),
    ("ppo.kl.target", 0.2, {}, {"ppo.kl.controller": "adaptive"}),
    ("ppo.kl.horizon", 100, {}, {"ppo.kl.controller": "adaptive"}),
    ("ppo.kl.controller", "adaptive", {"ppo.kl.coefficient": 0.0}, {}),
    ("ppo.value_warmup_steps", 3, {"steps": 3}, {"steps": 4}),
    ("rollout.vllm_memory_share", 0.5, {}, {"rollout.backend": "vllm", "models.actor": {"path": "a"}, "ppo.tis": "all"}),
    ("rollout.vllm_sleep", True, {}, {"rollout.backend": "vllm", "models.actor": {"path": "a"}, "ppo.tis": "all"}),
    ("training.zero_stage", 1, {}, {"training.backend": "deepspeed"}),
    ("training.zero_stage", 1, {"training.backend": "fsdp2"}, {"training.backend": "deepspeed"}),
    ("training.offload", "optimizer", {}, {"training.backend": "deepspeed"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "idle", "used"), IDLE)
def test_setting_without_effect_is_rejected(
    minimal: dict[str, Any], path: str, value: Any, idle: dict[str, Any], used: dict[str, Any]
) -> None:
    def changed(*changes: dict[str, Any]) -> dict[str, Any]:
        data = minimal
        for where, new in [pair for each in changes for pair in each.items()]:
            data = change(data, where, new)
        return data

    (problem,) = refused(changed(idle, {path: value}))
    assert problem.path == path
    assert re.match("has no effect|leaves none", problem.message)
    assert problem.allowed
    load_spec(changed({path: value}, used))
    load_spec(changed(idle))


@pytest.mark.parametrize("key", ["name", "steps", "models", "data"])
def test_a_missing_key_is_named_with_what_belongs_there(minimal: dict[str, Any], key: str) -> None:
    del minimal[key]
    (problem,) = refused(minimal)
    assert (problem.path, problem.message) == (key, "is required")
    assert problem.allowed


@pytest.mark.parametrize("data", [None, [], "text", 1, {1: 2}, {None: 1}, {(1,): {(2,): 3}}])
def test_data_that_is_not_a_mapping_is_rejected(data: Any) -> None:
    problems = refused(data)
    assert all(problem.message for problem in problems)


def test_all_complaints_come_at_once_and_in_bounded_number(minimal: dict[str, Any]) -> None:
    assert {p.path for p in refused(minimal | {"seed": -1, "steps": 0, "ppo": {"gamma": 2}})} == {"seed", "steps", "ppo.gamma"}
    many = refused(minimal | {f"key{i}": i for i in range(1000)})
    assert len(many) == MAX_PROBLEMS + 1
    assert many[-1].message == f"has {1000 - MAX_PROBLEMS} more problems"


def test_a_critic_cannot_start_from_a_rule(minimal: dict[str, Any]) -> None:
    (problem,) = refused(change(minimal, "models", {"actor": {"path": "a"}, "reward": {"rule": "a:b"}, "critic": "reward"}))
    assert (problem.path, problem.value, problem.allowed) == (
        "models.critic",
        '"reward"',
        "actor, or a mapping with path or tiny",
    )


def test_unprintable_number(minimal: dict[str, Any]) -> None:
    (problem,) = refused(change(minimal, "seed", 16**5000))
    assert (problem.message, problem.value) == ("is too large", "a value that cannot be displayed")


def test_a_long_value_is_shortened(minimal: dict[str, Any]) -> None:
    (problem,) = refused(change(minimal, "seed", "x" * 10_000))
    assert len(problem.value or "") <= 80


def test_a_problem_as_json_leaves_out_what_is_empty() -> None:
    assert SpecProblem("seed", "is required").as_dict() == {"path": "seed", "message": "is required"}


TEXTS = {
    "broken": ("a: [1", "is not valid YAML at line 1"),
    "tab": ("a:\n\tb: 1", "is not valid YAML at line 2, column 1"),
    "duplicate": ("seed: 1\nsteps: 2\nseed: 3", 'line 3, column 1: found duplicate key "seed"'),
    "nested duplicate": ("ppo: {epochs: 1, epochs: 2}", 'found duplicate key "epochs"'),
    "alias": ("a: &x 1\nb: *x", "uses an alias (*) at line 2"),
    "merge key": ("a: &x {b: 1}\n<<: *x", "uses an alias (*) at line 2"),
    "billion laughs": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "uses an alias (*) at line 2"),
    "python tag": ("a: !!python/object/apply:os.system ['true']", "uses a tag (!) at line 1"),
    "own tag": ("a: !mine 1", "uses a tag (!) at line 1"),
    "standard tag": ("a: !!bool maybe", "uses a tag (!) at line 1"),
    "two documents": ("a: 1\n---\nb: 2", "another document"),
    "control character": ("a: \x00", "is not valid YAML"),
    "lone surrogate": ("a: \ud800", "is not valid YAML"),
    "deep": ("[" * 21, "is nested deeper than 20 levels"),
    "impossible date": ("name: 2020-13-45", "is not valid YAML"),
    "digits": ("seed: " + "1" * 5000, "is not valid YAML"),
    "mapping as a key": ("? {a: b}\n: 2", "found unhashable key"),
    "many values": ("a: [" + "1," * 20_000 + "]", "contains more than 10,000 keys and values"),
    "empty": ("", "is empty"),
    "only a comment": ("# nothing", "is empty"),
    "too long": ("# " + "x" * MAX_SPEC_BYTES, "is 262,146 bytes long; at most 262,144 are accepted"),
    "too long in bytes": ("#" + "é" * (MAX_SPEC_BYTES // 2), "is 262,145 bytes long"),
}


@pytest.mark.parametrize(("text", "words"), TEXTS.values(), ids=TEXTS)
def test_invalid_yaml_is_rejected(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_yaml(text)
    (problem,) = caught.value.problems
    assert problem.path == ""
    assert words in problem.message
    assert "\n" not in problem.message


@given(st.text(st.sampled_from("ab01:-,[]{}&*!|>'\"%@`#?~.\n\t \x00é\ud800<=_"), max_size=60))
@example("a: 0x" + "f" * 5000)
@settings(deadline=None, max_examples=300)
def test_any_text_raises_spec_errors_only(text: str) -> None:
    problems = complaints(lambda: load_spec(parse_yaml(text)))
    assert problems
    assert all(problem.message for problem in problems)


def test_numbers_are_those_of_yaml_1_2() -> None:
    data = parse_yaml("a: 1e-5\nb: 0o17\nc: 017\nd: off\ne: yes\nf: 12:30\ng: .inf\nh: 1_000")
    assert data == {"a": 1e-5, "b": 15, "c": 17, "d": "off", "e": "yes", "f": "12:30", "g": float("inf"), "h": 1000}

"""Prompts that are conversations: samples, rules and services get their turns apart, without the template's text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from oppo_core.engine.preflight import preflight
from tests.engine.rewards.rule_packages import RULES, install

TALK = [{"role": "system", "content": "w1 w2"}, {"role": "user", "content": "w3", "name": "ada"}]
ANSWERED = [*TALK, {"role": "assistant", "content": "w4"}, {"role": "user", "content": "w5 w6"}]


def chatty(world: Any, tmp_path: Path) -> dict[str, Any]:
    """An actor with a chat template, and prompts of every kind, held-out ones too."""
    shutil.copytree(world.folder / "actor", tmp_path / "actor")
    (tmp_path / "actor" / "chat_template.jinja").write_text("{% for m in messages %}w0 {{ m.content }} {% endfor %}")
    rows = [{"prompt": TALK}, {"prompt": ANSWERED}, {"prompt": "w7"}, {"prompt": [3, 4]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "steps": 1, "models": {"actor": {"path": str(tmp_path / "actor")}, "critic": "actor"}, "ppo": {"batch_size": 4},
        "data": {"prompts": str(tmp_path / "prompts.jsonl"), "shuffle": False}, "logging": {"samples_per_step": 4},
        "evaluation": {"prompts": str(tmp_path / "prompts.jsonl"), "every_steps": 1, "count": 2},
        "overlap": {"intra_step": "off", "inter_step": "off"},
    }  # fmt: skip


def test_samples_carry_the_turns_apart(world: Any, tmp_path: Path) -> None:
    run = world.run(world.spec(chatty(world, tmp_path)), tmp_path / "run")
    events = [event for event in run.events if event.kind == "samples"]
    told = {s.prompt: s.messages for event in events for s in event.samples if not s.held_out}
    assert told.keys() == {"w3", "w5 w6", "w7", "w0 w1"}
    assert told["w7"] is told["w0 w1"] is None
    assert [message.model_dump() for message in told["w5 w6"]] == [{"role": m["role"], "content": m["content"]} for m in ANSWERED]
    held_out = {s.prompt: s.messages for event in events for s in event.samples if s.held_out}
    assert [len(held_out[prompt]) for prompt in ("w3", "w5 w6")] == [2, 4]


def test_a_rule_scores_the_turns_in_the_scorers_process(world: Any, tmp_path: Path, monkeypatch: Any) -> None:
    install(tmp_path, "rules-of-turns", "rules_of_turns", RULES, {"test:turns": "turns"})
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = chatty(world, tmp_path)
    changes["models"]["reward"] = {"model": None, "rule": "test:turns"}
    changes["overlap"]["intra_step"] = "per_chunk"
    run = world.run(world.spec(changes), tmp_path / "run", inline=True)
    scores = {s.prompt: s.score for event in run.events if event.kind == "samples" for s in event.samples}
    assert scores == {"w3": 2.0, "w5 w6": 4.0, "w7": 0.0, "w0 w1": 0.0}


def test_the_check_before_a_run_gives_a_rule_the_turns_too(world: Any, tmp_path: Path, monkeypatch: Any) -> None:
    install(tmp_path, "rules-of-turns", "rules_of_turns", RULES, {"test:last": "last_turn"})
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = chatty(world, tmp_path)
    changes["models"]["reward"] = {"model": None, "rule": "test:last"}
    assert preflight(world.spec(changes), [world.folder]).errors == []

"""Rules: found by name, called with their parameters, and refused with the reason."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.prompt_records import PromptRecords
from oppo_core.rewards.protocol import Answer
from oppo_core.rewards.registry import find_rule, registered_rules
from oppo_core.rewards.rule import RuleReward
from oppo_core.rollout.tokenizer import ByteCodec
from tests.engine.rewards.rule_packages import NAMES, RULES, install

CODEC = ByteCodec(300)


def answer_of(prompt: str, response: str, number: int = 0, ended: bool = True) -> Answer:
    ids = [i for i in CODEC.encode(response) if i != 1]
    return Answer(number, CODEC.encode(prompt), ids + [CODEC.eos] * ended, CODEC)


def rule_scores(name: str, *answers: Answer, lines: PromptRecords | None = None) -> list[float]:
    """The rule's scores."""
    rule = RuleReward(name, find_rule(name), lines)
    rule.start(list(answers), lambda: None)
    return [rule.score(answer.sequence_id) for answer in answers]


def test_find_rule_by_name(rules: Path) -> None:
    assert {"letters:score", *NAMES} <= set(registered_rules())
    assert rule_scores("test:few", answer_of("say it", "a b a")) == [pytest.approx(-0.1)]


def test_optional_rule_parameters(rules: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "bonus": 5}\n{"prompt": "two", "bonus": 7}\n')
    lines = PromptRecords()
    lines.read(tmp_path / "p.jsonl", "prompt", CODEC, 50)
    scores = rule_scores("test:parameters", answer_of("two", "abc", 1), answer_of("one", "abcd", 2, ended=False), lines=lines)
    assert scores == pytest.approx([1 + 0.04 + 7, 0 + 0.04 + 5])


def test_a_rule_that_accepts_messages_gets_the_turns_of_a_conversation(rules: Path) -> None:
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "add two and three"}]
    chat = replace(answer_of("be brief add two and three", "five", 1), messages=talk)
    assert rule_scores("test:turns", answer_of("add two", "x"), chat) == [0.0, 2.5]
    assert rule_scores("test:few", chat) == [pytest.approx(-0.1 + 0.05 * 4)], "it gets the last user turn as prompt"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test:raises", ["test:raises", "sequence 0", "KeyError", "no answer in"]),
        ("test:nan", ["returned nan", "finite"]),
        ("test:text", ["'7'", "str", "not a number"]),
        ("test:backwards", ["must take (prompt, response"]),
        ("test:greedy", ["unknown parameters solution", "ended, length, messages, line"]),
        ("test:constant", ["is a float, not a function"]),
        ("test:gone", ["cannot be imported", "AttributeError"]),
        ("os:getcwd", ["there is no rule os:getcwd", "letters:score", "docs/rewards.md"]),
        ("rules_of_a_test:few", ["there is no rule"]),
    ],
)
def test_rule_errors(rules: Path, name: str, words: list[str]) -> None:
    with pytest.raises(RewardError) as caught:
        rule_scores(name, answer_of("say it", "a b a"))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_duplicate_rule_names_are_refused(
    rules: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path_factory.mktemp("second")
    install(second, "more_rules", "more_rules_of_a_test", RULES, {"test:few": "few"})
    monkeypatch.syspath_prepend(str(second))
    with pytest.raises(RewardError, match="registered more than once"):
        find_rule("test:few")


def test_a_rule_of_a_new_editable_install_is_found(rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "being-written"
    written.mkdir()
    install(rules, "edited_rules", "edited_rules_of_a_test", "", {"test:edited": "few"})
    (rules / "edited_rules_of_a_test.py").rename(written / "edited_rules_of_a_test.py")
    (written / "edited_rules_of_a_test.py").write_text(RULES)
    (rules / "edited.pth").write_text(f"{written}\n")  # read when an interpreter begins, and this one has begun
    monkeypatch.setattr("site.getsitepackages", lambda: [str(rules)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert find_rule("test:edited")("", "a b") == find_rule("test:few")("", "a b")


def test_ambiguous_prompt_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "bonus": 5}\n{"prompt": "two"}\n{"prompt": "one", "bonus": 6}\n')
    with pytest.raises(RewardError, match=r"p.jsonl, line 3 has the same prompt as p.jsonl, line 1"):
        PromptRecords().read(tmp_path / "p.jsonl", "prompt", CODEC, 50)
    PromptRecords(("messages",)).read(tmp_path / "p.jsonl", "prompt", CODEC, 50)  # without the field that differs

"""Rules, models that read text, and sums of parts: each score equals a plain computation from the answer's tokens."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.spec import ModelSpec, RunSpec, load_spec
from oppo_core.engine.build import build_scorers
from oppo_core.models.model_io import load_model
from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.prompt_records import PromptRecords
from oppo_core.rewards.protocol import Answer
from oppo_core.rewards.registry import find_rule, registered_rules
from oppo_core.rewards.rule import RuleReward
from oppo_core.rewards.service_auth import HOSTS_VARIABLE
from oppo_core.rollout.tokenizer import ByteCodec, FileCodec
from oppo_core.trace.recorder import Recorder
from tests.engine.models.architectures import config_of, full_precision
from tests.engine.rewards.reward_server import Judge, judging, worth

CPU = torch.device("cpu")
RULES = '''
"""Rules of a test."""
import time


def few(prompt, response):
    return -0.1 * len(set(response.split())) + 0.05 * len(prompt.split())


def told(prompt, response, *, ended, length, line):
    return (1.0 if ended else 0.0) + length / 100 + line["bonus"]


def raises(prompt, response):
    raise KeyError("no answer in " + prompt)


def nan(prompt, response):
    return float("nan")


def text(prompt, response):
    return "7"


def backwards(response, prompt):
    return 0.0


def greedy(prompt, response, solution):
    return 0.0


def hangs(prompt, response):
    while True:
        time.sleep(0.01)


constant = 3.0
'''
NAMES = {
    "test:few": "few", "test:told": "told", "test:raises": "raises", "test:nan": "nan", "test:text": "text",
    "test:backwards": "backwards", "test:greedy": "greedy", "test:hangs": "hangs", "test:constant": "constant",
    "test:gone": "gone",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if messages[0]['content'] == 'refuse' %}{{ raise_exception('not this') }}{% endif %}"
)
CHARACTERS = sorted(set("abcdefghijklmnopqrstuvwxyz0123456789 <>"))
CODEC = ByteCodec(300)


def install(folder: Path, distribution: str, module: str, source: str, entries: dict[str, str]) -> None:
    """What an installed package leaves in a folder of sys.path."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {module}:{function}\n" for name, function in entries.items())
    (info / "entry_points.txt").write_text(f"[oppo.rules]\n{lines}")


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with the rules of RULES is installed, also for the processes that a test starts."""
    folder = tmp_path / "packages"
    folder.mkdir()
    install(folder, "test_rules", "rules_of_a_test", RULES, NAMES)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    yield folder
    sys.modules.pop("rules_of_a_test", None)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with a tokenizer of its own: a token a character, <s> in front, and a chat template."""
    folder = tmp_path_factory.mktemp("other") / "judge"
    torch.manual_seed(8)
    sizes = {"num_labels": 1, "vocab_size": len(CHARACTERS) + 3, "max_position_embeddings": 1024}
    AutoModelForSequenceClassification.from_config(config_of("llama", **sizes)).save_pretrained(folder)
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def rewarded(world: Any, reward: Any, *changes: Any) -> RunSpec:
    """The world's spec with this `models.reward`."""
    tree = world.tree({"steps": 3, "models": {"critic": "actor"}}, *changes)
    return load_spec(tree | {"models": tree["models"] | {"reward": reward}})


def trained(run: Any) -> list[tuple[Any, float]]:
    """Every trained sequence with its score."""
    return [pair for s in run.steps for pair in zip(s.experience.sequences, s.experience.scores.tolist(), strict=True)]


@cache
def plain_model(folder: Path) -> Any:
    """Transformers' own classifier, float64."""
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


@torch.no_grad()
def plain_score(folder: Path, ids: list[int]) -> float:
    """Its score of one row."""
    with full_precision():
        return float(plain_model(folder)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 0])


# ---- rules -----------------------------------------------------------------------------------------------------------


def answer_of(prompt: str, response: str, number: int = 0, ended: bool = True) -> Answer:
    ids = [i for i in CODEC.encode(response) if i != 1]
    return Answer(number, CODEC.encode(prompt), ids + [CODEC.eos] * ended, CODEC)


def asked(name: str, *answers: Answer, lines: PromptRecords | None = None) -> list[float]:
    """The rule's scores."""
    rule = RuleReward(name, find_rule(name), lines)
    rule.start(list(answers), lambda: None)
    return [rule.score(answer.sequence_id) for answer in answers]


def test_a_registered_rule_is_found_by_its_name(rules: Path) -> None:
    assert {"letters:score", *NAMES} <= set(registered_rules())
    assert asked("test:few", answer_of("say it", "a b a")) == [pytest.approx(-0.1)]


def test_a_rule_is_told_what_it_asks_for(rules: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "bonus": 5}\n{"prompt": "two", "bonus": 7}\n')
    lines = PromptRecords()
    lines.read(tmp_path / "p.jsonl", "prompt", CODEC, 50)
    scores = asked("test:told", answer_of("two", "abc", 1), answer_of("one", "abcd", 2, ended=False), lines=lines)
    assert scores == pytest.approx([1 + 0.04 + 7, 0 + 0.04 + 5])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test:raises", ["test:raises", "sequence 0", "KeyError", "no answer in"]),
        ("test:nan", ["returned nan", "finite"]),
        ("test:text", ["'7'", "str", "no number"]),
        ("test:backwards", ["must take (prompt, response"]),
        ("test:greedy", ["asks for solution", "ended, length, line"]),
        ("test:constant", ["is a float, not a function"]),
        ("test:gone", ["cannot be imported", "AttributeError"]),
        ("os:getcwd", ["there is no rule os:getcwd", "letters:score", "docs/rewards.md"]),
        ("rules_of_a_test:few", ["there is no rule"]),
    ],
)
def test_what_is_wrong_with_a_rule_is_said(rules: Path, name: str, words: list[str]) -> None:
    with pytest.raises(RewardError) as caught:
        asked(name, answer_of("say it", "a b a"))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_a_name_that_two_packages_register_is_refused(
    rules: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path_factory.mktemp("second")
    install(second, "more_rules", "more_rules_of_a_test", RULES, {"test:few": "few"})
    monkeypatch.syspath_prepend(str(second))
    with pytest.raises(RewardError, match="registered more than once"):
        find_rule("test:few")


def test_a_package_that_was_installed_for_editing_meanwhile_is_found(
    rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "being-written"
    written.mkdir()
    install(rules, "edited_rules", "edited_rules_of_a_test", "", {"test:edited": "few"})
    (rules / "edited_rules_of_a_test.py").rename(written / "edited_rules_of_a_test.py")
    (written / "edited_rules_of_a_test.py").write_text(RULES)
    (rules / "edited.pth").write_text(f"{written}\n")  # read when an interpreter begins, and this one has begun
    monkeypatch.setattr("site.getsitepackages", lambda: [str(rules)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert find_rule("test:edited")("", "a b") == find_rule("test:few")("", "a b")


def test_two_lines_with_one_prompt_and_different_answers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "bonus": 5}\n{"prompt": "two"}\n{"prompt": "one", "bonus": 6}\n')
    with pytest.raises(RewardError, match=r"p.jsonl, line 3 has the same prompt as p.jsonl, line 1"):
        PromptRecords().read(tmp_path / "p.jsonl", "prompt", CODEC, 50)
    PromptRecords(("messages",)).read(tmp_path / "p.jsonl", "prompt", CODEC, 50)  # nobody asks for what differs


# ---- models that read text -------------------------------------------------------------------------------------------


def test_a_model_with_another_tokenizer_scores_the_text(world: Any, other: Path, tmp_path: Path) -> None:
    spec = rewarded(world, {"model": {"path": str(other)}, "reads": "text"})
    run = world.run(spec, tmp_path, threads=1)
    codec, tokenizer = FileCodec(world.folder / "actor"), PreTrainedTokenizerFast.from_pretrained(other)
    rows = trained(run)
    assert len(rows) == 18
    for sequence, score in rows:
        text = codec.decode([*sequence.prompt.tolist(), *sequence.response])
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == 1
        assert len(ids) > sequence.length
        assert score == pytest.approx(plain_score(other, ids), abs=1e-10)


def test_a_text_model_without_room_reads_fewer_answers_at_once(world: Any, other: Path) -> None:
    spec = rewarded(world, {"model": {"path": str(other)}, "reads": "text"})
    given = (spec, [world.folder], None, None, None, None, Recorder(("cpu:0",)))
    plenty, short = (build_scorers(given[0], given[1], CPU, *given[2:]) for _ in range(2))
    codec = FileCodec(world.folder / "actor")
    answers = [Answer(n, [3, 4, 5], list(range(6, 12 + 3 * n)), codec) for n in range(12)]
    (reads,), (reads_less,) = plenty.reward.finished.values(), short.reward.finished.values()
    own, asked, room = reads_less._network.hidden, [], max(len(reads_less._tokens(answer)) for answer in answers)

    def hidden(tokens: Any, positions: Any) -> Any:
        asked.append(tokens.numel())
        if tokens.numel() > room:
            raise torch.OutOfMemoryError("no memory")
        return own(tokens, positions)

    reads_less._network.hidden = hidden
    for part in (reads, reads_less):
        part.start(answers, lambda: None)
    assert max(asked) > room
    assert reads_less.budget.tokens < 400
    assert [reads_less.score(n) for n in range(12)] == pytest.approx([reads.score(n) for n in range(12)], abs=1e-10)
    assert [shrunk.passes for shrunk in short.trace.take_shrunk()][:1] == ["text-reads"]


def test_a_model_with_a_chat_template_scores_the_conversation(world: Any, other: Path, tmp_path: Path) -> None:
    """Prompts with `messages` are conversations, the others the user's only message."""
    codec, tokenizer = FileCodec(world.folder / "actor"), PreTrainedTokenizerFast.from_pretrained(other)
    before = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    rows = [{"prompt": [3, 4, 5], "messages": before}, {"prompt": [6, 7]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = {"data": {"prompts": str(tmp_path / "p.jsonl")}}
    run = world.run(rewarded(world, {"model": {"path": str(other)}, "reads": "chat"}, prompts), tmp_path / "out", threads=1)
    seen = set()
    for sequence, score in trained(run):
        own = [{"role": "user", "content": codec.decode(sequence.prompt.tolist())}]
        messages = before if sequence.prompt.tolist() == [3, 4, 5] else own
        told = [*messages, {"role": "assistant", "content": codec.decode(sequence.response)}]
        rendered = "".join(f"<{message['role']}>{message['content']}" for message in told)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert score == pytest.approx(plain_score(other, ids), abs=1e-10)
        seen.add(len(messages))
    assert seen == {1, 2}


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"model": {"path": "without-tokenizer"}, "reads": "text"}, "cannot be read"),
        ({"model": {"path": "other-tokens"}}, "let it read: text"),
        ({"model": {"tiny": {"context": 128}}, "reads": "chat"}, "has no chat template"),
        ({"rule": "os:getcwd"}, "there is no rule os:getcwd"),
        ({"http": {"url": "http://127.0.0.1:9/x"}}, "OPPO_REWARD_HOSTS=127.0.0.1:9"),
        ({"parts": [{"rule": "letters:score"}, {"rule": "letters:best"}]}, "there is no rule letters:best"),
    ],
)
def test_what_cannot_score_is_refused_before_the_first_step(world: Any, tmp_path: Path, reward: Any, words: str) -> None:
    shutil.copytree(world.folder / "reward", tmp_path / "without-tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    tree = json.loads(rewarded(world, reward).model_dump_json())
    status, events = world.main(tree, tmp_path / "out", "--root", tmp_path)
    assert status == 1
    assert [event.kind for event in events] == ["finished"]
    assert words in events[0].reason


@pytest.mark.parametrize(
    "change",
    [
        {"models": {"reward": {"parts": [{"rule": "letters:score"}, {"model": {"path": "gone"}}]}, "critic": "actor"}},
        {"models": {"reward": {"rule": "letters:score"}, "critic": "actor", "reference": {"path": "gone"}}},
        {"models": {"reward": {"rule": "letters:score"}, "critic": {"path": "gone"}}},
    ],
    ids=["another part", "reference", "critic"],
)
def test_a_reward_lets_go_of_what_it_started_when_a_model_is_missing(
    world: Any, rules: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    closed: list[RuleReward] = []
    monkeypatch.setattr(RuleReward, "close", lambda reward: closed.append(reward))
    tree = world.tree(change)
    tree["models"]["reward"].pop("model", None)
    with pytest.raises(ModelFolderError, match="gone"):
        build_scorers(load_spec(tree), [world.folder], CPU, None, None, None, None, Recorder(("cpu:0",)))
    assert len(closed) == 1


def test_an_answer_too_long_for_the_text_model_is_named(world: Any, other: Path, tmp_path: Path) -> None:
    folder = tmp_path / "short"
    sizes = {"num_labels": 1, "vocab_size": len(CHARACTERS) + 3, "max_position_embeddings": 16}
    AutoModelForSequenceClassification.from_config(config_of("llama", **sizes)).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(other).save_pretrained(folder)
    tree = json.loads(rewarded(world, {"model": {"path": str(folder)}, "reads": "text"}).model_dump_json())
    _, events = world.main(tree, tmp_path / "out")
    assert "its context is 16" in events[-1].reason


# ---- sums ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    with judging() as listening:
        monkeypatch.setenv(HOSTS_VARIABLE, listening.place)
        yield listening


WEIGHTS = (0.7, -2.0, 1.5, 0.3)


def parts_of(judge: Judge, other: Path) -> Any:
    """One part of each kind."""
    sources: list[dict[str, Any]] = [
        {"model": {"path": "reward"}}, {"rule": "test:few"}, {"http": {"url": judge.url, "answers_a_request": 2}},
        {"model": {"path": str(other)}, "reads": "text"},
    ]  # fmt: skip
    return {"parts": [source | {"weight": weight} for source, weight in zip(sources, WEIGHTS, strict=True)]}


def oracle(world: Any, other: Path) -> Callable[[Any], list[float]]:
    """Each part's raw score of a sequence, computed alone and at once."""
    codec, tokenizer = FileCodec(world.folder / "actor"), PreTrainedTokenizerFast.from_pretrained(other)
    network = load_model(ModelSpec(path="reward"), "scalar", [world.folder], torch.float64, 0)
    rule = find_rule("test:few")

    @torch.no_grad()
    def scores(sequence: Any) -> list[float]:
        ids = torch.from_numpy(sequence.tokens())[None]
        prompt, response = codec.decode(sequence.prompt.tolist()), codec.decode(sequence.response)
        hidden = network.hidden(ids, torch.arange(ids.shape[1])[None])
        text = tokenizer(codec.decode(ids[0].tolist()))["input_ids"]
        return [
            float(network.scalar(hidden[0, -1])), rule(prompt, response),
            worth({"response": response, "ended": sequence.ended_by_eos}), plain_score(other, text),
        ]  # fmt: skip

    return scores


MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "sequential": (1, {"overlap": {"intra_step": "off"}}),
    "per_chunk": (2, {"overlap": {"intra_step": "per_chunk"}}),
    "update_overlap": (2, {"overlap": {"update_overlap": True}}),
}


@pytest.mark.usefixtures("spawned_scorers")  # which see the environment
@pytest.mark.parametrize("overlapped", ["per_chunk", pytest.param("update_overlap", marks=pytest.mark.full)])
def test_the_weighted_sum_of_parts_in_every_mode(
    world: Any, rules: Path, judge: Judge, other: Path, tmp_path: Path, overlapped: str
) -> None:
    runs = {}
    for name in ("sequential", overlapped):
        threads, changes = MODES[name]
        spec = rewarded(world, parts_of(judge, other), {"rollout": {"stop_tokens": [9, 17]}}, changes)
        runs[name] = world.run(spec, tmp_path / name, threads=threads)
    assert {s.ending for s, _ in trained(runs["sequential"])} >= {"stop", "eos"}
    scores = oracle(world, other)
    for step in runs["sequential"].steps:
        raw = [scores(sequence) for sequence in step.experience.sequences]
        sums = [sum(weight * score for weight, score in zip(WEIGHTS, row, strict=True)) for row in raw]
        assert step.experience.scores.tolist() == pytest.approx(sums, abs=1e-10)
        for number, column in enumerate(zip(*raw, strict=True)):
            told = [step.metrics[f"critic/score_part/{number}/{which}"] for which in ("mean", "max", "min")]
            assert told == pytest.approx([sum(column) / len(column), max(column), min(column)], abs=1e-10)
    for plain, step in zip(runs["sequential"].steps, runs[overlapped].steps, strict=True):
        assert plain.tokens == step.tokens
        torch.testing.assert_close(step.experience.scores, plain.experience.scores, rtol=0, atol=1e-10)


def test_a_single_part_of_weight_one_is_the_single_source_to_the_bit(world: Any, tmp_path: Path) -> None:
    single = world.run(rewarded(world, {"model": {"path": "reward"}}), tmp_path / "single", inline=True)
    listed = world.run(rewarded(world, {"parts": [{"model": {"path": "reward"}}]}), tmp_path / "listed", inline=True)
    assert single.steps[-1].metrics == listed.steps[-1].metrics
    for name, weight in single.weights("actor").items():
        assert torch.equal(weight, listed.weights("actor")[name])
    assert not any(name.startswith("critic/score_part") for name in listed.steps[-1].metrics)

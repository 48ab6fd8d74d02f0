"""The prompts file: text, conversations and token ids; errors with line numbers; the digest checked at a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oppo_core.checkpointing.atomic_dir import CheckpointError
from oppo_core.rewards.prompt_records import MESSAGES, PromptRecords
from oppo_core.rollout.chat import ChatError
from oppo_core.rollout.prompts import PromptError, PromptStream, digest, read_prompts
from oppo_core.rollout.tokenizer import ByteCodec, FileCodec
from tests.engine.conftest import write_tokenizer

WORDS = ["<pad>", "<bos>", "<eos>", "<user>", "<system>", "<assistant>", "add", "two", "and", "three", "be", "brief"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }} {{ m.content }} eos {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
BARE = [word.strip("<>") for word in WORDS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a tokenizer but no chat template."""
    path = tmp_path / "model"
    path.mkdir()
    write_tokenizer(path, BARE)
    (path / "config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0}))
    return path


def lines(tmp_path: Path, *values: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": value}) + "\n" for value in values))
    return path


def ids(text: str) -> list[int]:
    return [BARE.index(word) for word in text.split()]


TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "add two and three"}]


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_conversation_is_rendered_up_to_the_answer(folder: Path, tmp_path: Path, place: str) -> None:
    """With the folder's template, from either file; text and token ids may be mixed in."""
    (folder / place).write_text(TEMPLATE if place.endswith("jinja") else json.dumps({"chat_template": TEMPLATE}))
    read = read_prompts(lines(tmp_path, TALK, "add two", [6, 7, 8], TALK[1:]), "prompt", FileCodec(folder), 16)
    assert [row.tolist() for row in read] == [
        ids("system be brief eos user add two and three eos assistant"),
        ids("add two"),
        [6, 7, 8],
        ids("user add two and three eos assistant"),
    ]


@pytest.mark.parametrize(
    ("conversation", "said"),
    [
        ([{"role": "user"}], "message 1 needs a text under 'content'; it has role"),
        ([TALK[0], {"role": "user", "content": ["add"]}], "message 2 needs a text under 'content'; it has list there"),
        ([{"content": "add"}], "message 1 needs a text under 'role'"),
        ([{"role": "tool", "content": "add"}], "refuses it: TemplateError: no tools here"),
        ([{"role": "", "content": "add"}], "message 1 has a role of 0 characters; 1 to 100 are allowed"),
        ([TALK[1]] * 1001, "a conversation of 1001 messages; at most 1000 are allowed"),
        ([TALK[0]] * 5, "has 21 tokens, rollout.max_prompt_tokens is 16"),
    ],
)
def test_an_invalid_conversation_is_reported_with_its_line(folder: Path, tmp_path: Path, conversation: Any, said: str) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(PromptError) as error:
        read_prompts(lines(tmp_path, TALK, conversation), "prompt", FileCodec(folder), 16)
    assert str(error.value).startswith("prompts.jsonl, line 2: ")
    assert said in str(error.value)


def test_a_conversation_without_a_chat_template_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        PromptError, match=r"line 1: the actor's tokenizer in model has no chat template .* give the prompts as text"
    ):
        read_prompts(lines(tmp_path, TALK), "prompt", FileCodec(folder), 16)
    with pytest.raises(PromptError, match=r"line 1: the actor is a built-in architecture that reads bytes"):
        read_prompts(lines(tmp_path, TALK), "prompt", ByteCodec(259), 16)
    with pytest.raises(ChatError):
        ByteCodec(259).chat(TALK)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON: Expecting property name enclosed in double quotes, at character 3"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8"),
        (b'["add"]', "has no 'prompt' (data.prompt_field); it has list"),
        (b'{"text": "add", "id": 1}', "it has text, id"),
        (b'{"prompt": []}', "not empty"),
        (b'{"prompt": [true, 3]}', "list of token ids from 0 to 11"),
        (b'{"prompt": [3, 12]}', "list of token ids from 0 to 11"),
        (b'{"prompt": {"role": "user"}}', "must be text, a list of messages"),
        (b'{"prompt": [{"role": "user", "content": "add"}, "two"]}', "must be text, a list of messages"),
        (b'{"prompt": null}', "must be text"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(folder: Path, tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "add two"}\n\n' + line + b"\n")
    with pytest.raises(PromptError) as error:
        read_prompts(path, "prompt", FileCodec(folder), 16)
    assert str(error.value).startswith("prompts.jsonl, line 3: ")
    assert said in str(error.value)
    assert str(error.value).count("line ") == 1


def test_a_chat_reward_receives_the_conversation(folder: Path, tmp_path: Path) -> None:
    """From any prompt key; a `messages` field takes precedence."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    path, codec, records = lines(tmp_path, TALK, "add two"), FileCodec(folder), PromptRecords((MESSAGES,))
    records.read(path, "prompt", codec, 16)
    assert records.record(codec.chat(TALK)) == {"messages": TALK}
    assert records.record(codec.encode("add two")) == {}
    path.write_text(json.dumps({"prompt": TALK, "messages": TALK[1:]}))
    other = PromptRecords((MESSAGES,))
    other.read(path, "prompt", codec, 16)
    assert other.record(codec.chat(TALK)) == {"messages": TALK[1:]}


def test_the_digest_tells_prompts_apart() -> None:
    prompts = [np.asarray([1, 2]), np.asarray([3])]
    assert digest(prompts) == PromptStream(prompts, 0, True).digest
    others = [prompts[::-1], [np.asarray([1]), np.asarray([2, 3])], [np.asarray([1, 2, 3])], prompts[:1], [*prompts, prompts[0]]]
    assert len({digest(prompts), *map(digest, others)}) == 6


def test_a_resume_with_other_prompts_is_refused(world: Any, tmp_path: Path) -> None:
    """Reformatted lines are accepted; other prompts, or another order, are refused."""
    rows = [json.loads(line) for line in (world.folder / "prompts.jsonl").read_text().splitlines()]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = world.spec({"steps": 1, "data": {"prompts": str(file)}, "overlap": {"intra_step": "off"}})
    run = world.run(spec, tmp_path / "run")
    checkpoint = next((run.out / "checkpoints").glob("step-*"))
    more = spec.model_copy(update={"steps": 2})
    file.write_text("".join(json.dumps(row | {"note": 1}, indent=None, separators=(",", ":")) + "\n\n" for row in rows))
    assert len(world.run(more, tmp_path / "same", resume=checkpoint).steps) == 1
    for changed in (rows[::-1], rows[:-1], [*rows[:-1], {"prompt": [3]}]):
        file.write_text("".join(json.dumps(row) + "\n" for row in changed))
        with pytest.raises(CheckpointError, match=r"does not hold the prompts that the checkpoint was made with"):
            world.assemble(more, tmp_path / "other", resume=checkpoint)

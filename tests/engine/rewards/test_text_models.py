"""Reward models that read text: scores equal transformers' own on the decoded answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from oppo_core.rewards.protocol import Answer
from oppo_core.rollout.tokenizer import FileCodec
from oppo_core.scoring.build import build_scorers
from oppo_core.trace.recorder import Recorder
from tests.engine.models.architectures import config_of
from tests.engine.rewards.plain_scores import plain_score, spec_with_reward, trained


def test_text_scores_equal_transformers(world: Any, text_model: Path, tmp_path: Path) -> None:
    spec = spec_with_reward(world, {"model": {"path": str(text_model)}, "reads": "text"})
    run = world.run(spec, tmp_path, threads=1)
    codec, tokenizer = FileCodec(world.folder / "actor"), PreTrainedTokenizerFast.from_pretrained(text_model)
    rows = trained(run)
    assert len(rows) == 18
    for sequence, score in rows:
        text = codec.decode([*sequence.prompt.tolist(), *sequence.response])
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == 1
        assert len(ids) > sequence.length
        assert score == pytest.approx(plain_score(text_model, ids), abs=1e-10)


def test_out_of_memory_reduces_the_pass_budget(world: Any, text_model: Path) -> None:
    spec = spec_with_reward(world, {"model": {"path": str(text_model)}, "reads": "text"})
    given = (spec, [world.folder], None, None, None, None, False, Recorder(("cpu:0",)))
    plenty, short = (build_scorers(given[0], given[1], torch.device("cpu"), *given[2:]) for _ in range(2))
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


def test_chat_scores_equal_transformers(world: Any, text_model: Path, tmp_path: Path) -> None:
    """Prompts with `messages` are conversations, the others the user's only message."""
    codec, tokenizer = FileCodec(world.folder / "actor"), PreTrainedTokenizerFast.from_pretrained(text_model)
    before = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    rows = [{"prompt": [3, 4, 5], "messages": before}, {"prompt": [6, 7]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = {"data": {"prompts": str(tmp_path / "p.jsonl")}}
    run = world.run(
        spec_with_reward(world, {"model": {"path": str(text_model)}, "reads": "chat"}, prompts), tmp_path / "out", threads=1
    )
    turns = set()
    for sequence, score in trained(run):
        own = [{"role": "user", "content": codec.decode(sequence.prompt.tolist())}]
        messages = before if sequence.prompt.tolist() == [3, 4, 5] else own
        conversation = [*messages, {"role": "assistant", "content": codec.decode(sequence.response)}]
        rendered = "".join(f"<{message['role']}>{message['content']}" for message in conversation)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert score == pytest.approx(plain_score(text_model, ids), abs=1e-10)
        turns.add(len(messages))
    assert turns == {1, 2}


def test_an_answer_longer_than_the_text_models_context_is_refused(world: Any, text_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "short"
    sizes = {"num_labels": 1, "vocab_size": 64, "max_position_embeddings": 16}
    AutoModelForSequenceClassification.from_config(config_of("llama", **sizes)).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(text_model).save_pretrained(folder)
    tree = json.loads(spec_with_reward(world, {"model": {"path": str(folder)}, "reads": "text"}).model_dump_json())
    _, events = world.main(tree, tmp_path / "out")
    assert "its context is 16" in events[-1].reason

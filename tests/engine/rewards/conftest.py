"""Installed rules, a classifier with its own tokenizer, and a reward service."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from oppo_core.rewards.service_auth import HOSTS_VARIABLE
from tests.engine.models.architectures import config_of
from tests.engine.rewards.reward_server import RewardServer, serve_rewards
from tests.engine.rewards.rule_packages import NAMES, RULES, install

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if messages[0]['content'] == 'refuse' %}{{ raise_exception('not this') }}{% endif %}"
)
CHARACTERS = sorted(set("abcdefghijklmnopqrstuvwxyz0123456789 <>"))


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
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    """A reward service that this process may contact."""
    with serve_rewards() as listening:
        monkeypatch.setenv(HOSTS_VARIABLE, listening.place)
        yield listening

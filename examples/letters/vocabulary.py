"""Word-level tokenizer of the task, saved for `tokenizers` and transformers' AutoTokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from oppo_core.rules.letters import ADJECTIVES, CLOSING, FORMS, NOUNS, OPENINGS, STOP, TOPICS, VERBS

from .grammar import REQUESTS

PAD, BOS, EOS, SEP = "<pad>", "<bos>", "<eos>", "<sep>"
SPECIAL = (PAD, BOS, EOS, SEP)


def token_id(token: str) -> int:
    """The id of a special token."""
    return SPECIAL.index(token)


def vocabulary() -> list[str]:
    """All tokens, special ones first; the id is the index."""
    request_words = [word for request in REQUESTS for word in request.split() if "{" not in word]
    words = ["the", "a", STOP, *OPENINGS, CLOSING, *request_words, *FORMS, *TOPICS, *NOUNS, *ADJECTIVES, *VERBS]
    return list(dict.fromkeys([*SPECIAL, *words]))


def build_tokenizer() -> Tokenizer:
    """A word-level tokenizer. A prompt encodes as `<bos> … <sep>`; an unknown word is an error."""
    ids = {token: number for number, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {SEP}", special_tokens=[(BOS, ids[BOS]), (SEP, ids[SEP])]
    )
    return tokenizer


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json; return the first path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    build_tokenizer().save(str(path))
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "sep_token": SEP}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")
    return path

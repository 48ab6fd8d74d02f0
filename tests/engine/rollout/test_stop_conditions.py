"""Stop tokens and stop texts: an answer ends at the token that completes one, for any tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.spec import ModelSpec
from oppo_core.models.model_io import load_model
from oppo_core.rollout.build import build_stop_conditions
from oppo_core.rollout.decoder import Decoder, DecodeSettings
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.stop_conditions import StopConditions
from oppo_core.rollout.tokenizer import ByteCodec, FileCodec

TEXT = ["the answer is 42. STOP here, naïve café — 你好世界 🙂🙃", "so\n\nUser: what now? END", "  two spaces, a 🏳️‍🌈 and é"] * 3
STOPS = ["STOP", "\n\nUser:", "世界", "🙂", "é", "e", "END", " a", "42. S"]


class TrainedCodec:
    """A `TextCodec` over a tokenizer of the real library, trained on a little text."""

    def __init__(self, kind: str) -> None:
        special = ["<pad>", "<bos>", "<eos>"]
        if kind == "bytes":
            tokenizer = Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            alphabet = pre_tokenizers.ByteLevel.alphabet()
            trainer: Any = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
        else:  # as Llama's and Mistral's: words begin with a mark that the first token's text loses
            tokenizer = Tokenizer(models.BPE(unk_token="<pad>"))
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            tokenizer.decoder = decoders.Metaspace()
            trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=special)
        tokenizer.train_from_iterator(TEXT, trainer)
        self._tokenizer = tokenizer
        self.vocab, self.eos, self.pad, self.digest = tokenizer.get_vocab_size(), 2, 0, kind

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


CODECS: dict[str, Any] = {"bytes": TrainedCodec("bytes"), "words": TrainedCodec("words"), "built in": ByteCodec(259)}


def first_hit(codec: Any, tokens: list[int], texts: list[str]) -> int | None:
    """Number of tokens after which the whole answer, decoded at once, contains a text."""
    for count in range(1, len(tokens) + 1):
        said = codec.decode(tokens[:count])
        if any(text in said for text in texts):
            return count
    return None


def followed(conditions: StopConditions, tokens: list[int], sequence_id: int = 1) -> int | None:
    """Number of tokens after which the conditions end an answer that grows token by token."""
    sequence = Sequence(sequence_id, 0, np.asarray([3]))
    for count, token in enumerate(tokens, start=1):
        sequence.response.append(token)
        if conditions.reached(sequence):
            return count
    return None


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("text", TEXT[:3])
def test_a_stop_text_matches_at_the_token_that_completes_it(kind: str, text: str) -> None:
    codec = CODECS[kind]
    tokens = codec.encode(text)
    hits = 0
    for stop in STOPS:
        wanted = first_hit(codec, tokens, [stop])
        assert followed(StopConditions([], [stop], codec), tokens) == wanted, stop
        hits += wanted is not None
    assert hits


def test_a_stop_text_may_span_tokens_and_start_inside_one() -> None:
    codec = CODECS["bytes"]
    tokens = codec.encode("so the answer is 42. STOP here")
    spread = [stop for stop in ("er is 4", "wer is 42. ST", "42. STOP") if stop not in map(codec.decode, [[t] for t in tokens])]
    assert len(spread) == 3
    for stop in spread:
        assert followed(StopConditions([], [stop], codec), tokens) == first_hit(codec, tokens, [stop]) is not None


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(CODECS)), texts=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
def test_arbitrary_tokens_match_like_plain_decoding(data: st.DataObject, kind: str, texts: list[str]) -> None:
    """Words, partial characters and special tokens in any order match as if everything were decoded after each token."""
    codec = CODECS[kind]
    piece = st.one_of(
        st.sampled_from([*STOPS, *TEXT[:3]]).map(codec.encode), st.lists(st.integers(0, codec.vocab - 1), min_size=1, max_size=3)
    )
    tokens = [token for part in data.draw(st.lists(piece, min_size=1, max_size=5)) for token in part]
    assert followed(StopConditions([], texts, codec), tokens) == first_hit(codec, tokens, texts)


def test_matching_is_the_same_after_interruption_or_restart() -> None:
    codec = CODECS["bytes"]
    tokens = codec.encode("what now? the answer is 42. STOP here")
    wanted = first_hit(codec, tokens, ["STOP"])
    conditions = StopConditions([], ["STOP"], codec)
    begun = Sequence(1, 0, np.asarray([3]))
    for token in codec.encode("so ST"):  # discarded half-way; the same number starts again
        begun.response.append(token)
        assert not conditions.reached(begun)
    assert followed(conditions, tokens) == wanted
    resumed = Sequence(1, 0, np.asarray([3]), response=tokens[: wanted - 1])
    other = StopConditions([], ["STOP"], codec)
    resumed.response.append(tokens[wanted - 1])
    assert other.reached(resumed), "earlier tokens were not decoded"


def test_each_token_of_a_long_answer_decodes_few_tokens() -> None:
    """Only the last few tokens are decoded again."""
    longest = 0

    class Watched(TrainedCodec):
        def decode(self, ids: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids)

    codec = Watched("bytes")
    assert followed(StopConditions([], ["never"], codec), codec.encode(" ".join(TEXT)) * 5) is None
    assert followed(StopConditions([], ["never"], codec), [codec.encode("🙂")[0]] * 500, 2) is None, "half a character, 500 times"
    assert longest <= 32


def decoded(world: Any, numbers: list[int], slots: int, stops: StopConditions, interrupt: int = 0) -> dict[int, Sequence]:
    actor = load_model(ModelSpec(path="actor"), "lm", [world.folder], torch.float64, 0)
    decoder = Decoder(actor, DecodeSettings(3, 2, 0.9, 12, 60, 400), slots, stops=stops)
    sequences = [Sequence(i, 0, np.asarray([3 + i % 30] * (1 + i % 12))) for i in numbers]
    decoder.begin(sequences)
    while decoder.live:
        decoder.round(0)
        if interrupt and decoder.rounds == interrupt and decoder.live:
            decoder.begin(list(decoder.live)[::-1])
    return {s.sequence_id: s for s in sequences}


def test_decoding_state_is_dropped_with_the_answer(world: Any) -> None:
    """Also for discarded answers."""
    stops = StopConditions([9, 17], ["w20"], Words())
    actor = load_model(ModelSpec(path="actor"), "lm", [world.folder], torch.float64, 0)
    decoder = Decoder(actor, DecodeSettings(3, 2, 0.9, 12, 60, 400), 8, stops=stops)
    sequences = [Sequence(i, 0, np.asarray([3 + i])) for i in range(8)]
    decoder.begin(sequences)
    decoder.round(0)
    left = [s for s in sequences if not s.finished]
    assert set(stops._tails) == {s.sequence_id for s in left}
    decoder.begin(left[1:])
    assert set(stops._tails) == {s.sequence_id for s in left[1:]}, "one left unfinished"
    while decoder.live:
        decoder.round(0)
    assert {s.ending for s in left[1:]} >= {"stop", "eos"}
    assert stops._tails == {}


@pytest.fixture
def plain(world: Any) -> dict[int, Sequence]:
    return decoded(world, [0, 4, 7, 11, 12, 30], 6, StopConditions([], [], ByteCodec(40)))


class Words:
    """The world's tokenizer: token 7 is "w4", and so on, with a space between."""

    vocab, eos, pad, digest = 40, 2, 0, "words"

    def encode(self, text: str) -> list[int]:
        return [3 + int(word[1:]) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"w{i - 3}" for i in ids if i > 2)


def cut(response: list[int], hit: Callable[[list[int]], bool]) -> list[int]:
    """The response up to the first token at which `hit` holds."""
    for count in range(1, len(response) + 1):
        if hit(response[:count]):
            return response[:count]
    return response


def test_an_answer_is_the_unstopped_one_cut_at_the_stop(world: Any, plain: dict[int, Sequence]) -> None:
    """Stop conditions change no token before the stop, in any batch, interrupted or not; the finish reason is set."""
    said = [Words().decode(s.response) for s in plain.values()]
    text = next(" ".join(words.split()[5:7]) for words in said if len(words.split()) > 8)
    stops = StopConditions([9, 17], [text], Words())
    results = [
        decoded(world, [0, 4, 7, 11, 12, 30], 6, stops),
        decoded(world, [30, 12, 11, 7, 4, 0], 9, stops),
        decoded(world, [0, 4, 7, 11, 12, 30], 6, stops, interrupt=4),
    ]
    endings = set()
    for number, whole in plain.items():
        wanted = cut(whole.response, lambda tokens: tokens[-1] in (9, 17) or text in Words().decode(tokens))
        for result in results:
            assert result[number].response == wanted
        sequence = results[0][number]
        endings.add(sequence.ending)
        assert sequence.stopped == (wanted[-1] in (9, 17) or text in Words().decode(wanted))
        assert sequence.ended_by_eos == (sequence.stopped or wanted[-1] == 2)
        assert (sequence.ending == "length") == (not sequence.ended_by_eos)
    assert "stop" in endings
    assert any(result.stopped and len(result.response) > 1 for result in results[0].values())


def test_a_run_with_stops_streamed_or_not(world: Any, tmp_path: Path) -> None:
    """Identical tokens; a stop avoids the missing-EOS penalty, and the step reports finish reasons."""
    rollout = {"stop_tokens": [9], "stop_texts": ["w11 w", "w20"], "max_new_tokens": 40}
    common = {"steps": 6, "rollout": rollout, "ppo": {"missing_eos_penalty": 1000.0}}
    off = world.run(world.spec(common, {"overlap": {"intra_step": "off"}}), tmp_path / "off")
    on = world.run(world.spec(common), tmp_path / "on", inline=True)
    assert [step.tokens for step in off.steps] == [step.tokens for step in on.steps]
    stopped = [s for step in on.steps for s in step.experience.sequences if s.ending == "stop"]
    assert len(stopped) > 5
    for step in on.steps:
        for sequence, score in zip(step.experience.sequences, step.experience.scores.tolist(), strict=True):
            assert (score < -500) == (sequence.ending == "length")
    told = [event.metrics for event in on.events if event.kind == "step"]
    assert all(sum(m[f"response_ended/{how}"] for how in ("eos", "stop", "length")) == pytest.approx(1) for m in told)
    assert max(m["response_ended/stop"] for m in told) > 0.3
    samples = [sample for event in on.events if event.kind == "samples" for sample in event.samples]
    assert {sample.ending for sample in samples} <= {"eos", "stop", "length"}


def test_a_stop_token_beyond_the_vocabulary_is_refused(world: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"stop_tokens: \[40, 99\].*0 to 39"):
        world.assemble(world.spec({"rollout": {"stop_tokens": [3, 40, 99]}}), tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "first", "others"),
    [
        ({"eos_token_id": 2}, None, 2, ()),
        ({"eos_token_id": [5, 2, 7]}, None, 5, (2, 7)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, 2, (7,)),
        ({"eos_token_id": 2}, {"eos_token_id": [9999, 4]}, 2, (4,)),  # no such token
    ],
)
def test_every_eos_id_in_a_models_files_ends_an_answer(
    world: Any, tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, first: int, others: tuple[int, ...]
) -> None:
    """Chat models end a turn with another token than a document."""
    folder = shutil.copytree(world.folder / "actor", tmp_path / "actor")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    codec = FileCodec(folder)
    assert (codec.eos, codec.extra_eos) == (first, others)
    stops = build_stop_conditions(world.spec(), codec)
    assert (stops.tokens if stops else frozenset()) == set(others)
    if others:
        assert stops is not None
        assert stops.reached(Sequence(0, 0, np.asarray([3]), [4, others[0]]))

"""The example task: its language, its rule, its learned reward, and that it is long-tailed as overlap needs it."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from examples.letters.grammar import (
    DEGRADATIONS,
    MAX_NEW_TOKENS,
    MAX_PROMPT_TOKENS,
    MAX_SENTENCES,
    MOODS,
    draw_prompt,
    draw_response,
    draw_varied_response,
    write,
)
from examples.letters.prepare import FAST, Settings, prepare, source_digest
from examples.letters.report import length_statistics, spearman
from examples.letters.vocabulary import EOS, build_tokenizer, token_id, vocabulary, write_tokenizer
from oppo_contract.spec import RunSpec
from oppo_contract.yaml_text import load_yaml
from oppo_core.models.model_io import load_tiny
from oppo_core.rollout.prompts import PromptError, read_prompts
from oppo_core.rollout.tokenizer import FileCodec
from oppo_core.rules.letters import CLOSING, FORMS, STOP, compute_marks, score

EXAMPLES = Path(__file__).parents[3] / "examples"
LETTER = "write a letter about the sea"
WARM_SENTENCE, COLD_SENTENCE = "the kind boat sees a gentle wave .", "the grim boat sees a bitter wave ."
NEUTRAL_SENTENCE = "the old boat sees a quiet wave ."
SENTENCES = [
    f"the {adjective} boat {verb} a small wave ." for adjective in ("old", "plain") for verb in ("sees", "finds", "calls")
]


def letter(*sentences: str) -> str:
    """A closed answer."""
    return " ".join(["well", *sentences, CLOSING])


@pytest.fixture(scope="module")
def drawn() -> list[tuple[str, str]]:
    """Prompts with ordinary answers."""
    rng = random.Random(3)
    prompts = [draw_prompt(rng) for _ in range(6000)]
    return [(prompt, draw_response(rng, prompt)) for prompt in prompts]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task as `--fast` makes it."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("models") / "letters"
    said: list[float] = []
    assert prepare(out, FAST, lambda share, doing: said.append(share))
    assert said == sorted(said)
    assert said[-1] == 1.0
    return out


def test_text_survives_the_tokenizer_both_ways(drawn: list[tuple[str, str]]) -> None:
    tokenizer = build_tokenizer()
    assert len(vocabulary()) == len(set(vocabulary())) == tokenizer.get_vocab_size() <= 96
    for prompt, answer in drawn[:200]:
        ids = tokenizer.encode(answer, add_special_tokens=False).ids
        assert tokenizer.decode([*ids, token_id(EOS)]) == answer
        assert tokenizer.encode(prompt).tokens == ["<bos>", *prompt.split(), "<sep>"]
        assert len(prompt.split()) + 2 <= MAX_PROMPT_TOKENS


def test_transformers_reads_the_tokenizer_as_the_engine_does(prepared: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(prepared / "actor"), FileCodec(prepared / "actor")
    assert theirs(LETTER)["input_ids"] == ours.encode(LETTER)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos, ours.pad) == (token_id(EOS), token_id("<pad>"))
    assert ours.digest == FileCodec(prepared / "reward").digest


def test_a_word_outside_the_language_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    with pytest.raises(Exception, match="vocabulary"):
        tokenizer.encode("write a sonnet about the sea")
    assert write_tokenizer(tmp_path).name == "tokenizer.json"


def test_answers_have_a_long_tail(drawn: list[tuple[str, str]]) -> None:
    lengths = [len(answer.split()) + 1 for _, answer in drawn]
    figures = length_statistics(lengths)
    assert 30 <= figures["length_median"] <= 50
    assert 45 <= figures["length_mean"] <= 90
    assert 270 <= figures["length_p95"] <= 340
    assert figures["tail_ratio"] >= 4.9
    assert max(lengths) <= MAX_NEW_TOKENS


def test_each_form_has_its_typical_length(drawn: list[tuple[str, str]]) -> None:
    for form, typical in FORMS.items():
        lengths = [len(answer.split()) for prompt, answer in drawn if form in prompt.split()]
        assert typical * 0.8 <= statistics.median(lengths) <= typical * 1.2


def test_held_out_prompts_are_not_trained_on() -> None:
    rng = random.Random(0)
    trained = {draw_prompt(rng) for _ in range(3000)}
    assert trained.isdisjoint(draw_prompt(rng, held_out=True) for _ in range(500))


def test_the_rule_likes_warmth() -> None:
    also_warm = WARM_SENTENCE.replace("sees", "meets")
    mixes = ([COLD_SENTENCE, SENTENCES[0]], SENTENCES[:2], [WARM_SENTENCE, SENTENCES[0]], [WARM_SENTENCE, also_warm])
    scores = [score(LETTER, letter(*mix)) for mix in mixes]
    assert scores == sorted(scores)
    assert scores[3] - scores[1] == pytest.approx(1.0)


def test_the_rule_likes_the_topic() -> None:
    elsewhere = letter(*[s.replace("boat", "oak").replace("wave", "fox") for s in SENTENCES[:4]])
    assert score(LETTER, letter(*SENTENCES[:4])) - score(LETTER, elsewhere) == pytest.approx(0.5)


def test_the_rule_minds_every_doubling_of_the_length() -> None:
    typical = letter(*SENTENCES[:4])
    assert compute_marks(LETTER, typical).octaves_off == pytest.approx(0, abs=0.05)
    shorter = [score(LETTER, letter(*SENTENCES[:count])) for count in (1, 2, 3, 4)]
    assert shorter == sorted(shorter)
    assert score(LETTER, letter(*SENTENCES[:4])) > score(LETTER, letter(*SENTENCES[:6]))
    as_a_saga = score("write a saga about the sea", typical)
    assert as_a_saga < score(LETTER, typical) - 1


def test_the_rule_minds_broken_repeated_and_unclosed_answers() -> None:
    whole = letter(*SENTENCES[:4])
    broken = letter(*SENTENCES[:3], "boat boat sees a small wave .")
    repeated = letter(*SENTENCES[:3], SENTENCES[0])
    assert score(LETTER, broken) < score(LETTER, whole)
    assert score(LETTER, repeated) < score(LETTER, whole)
    assert score(LETTER, whole.removesuffix(f" {CLOSING}")) < score(LETTER, whole) - 0.25
    assert compute_marks(LETTER, whole.replace(f" {STOP} {CLOSING}", "")).broken == 0.25
    assert score(LETTER, "") < -1
    assert score(LETTER, f"{whole} <eos>") == score(LETTER, whole)


def test_a_prompt_without_form_or_topic_is_refused() -> None:
    with pytest.raises(ValueError, match="names none of note, letter, story, saga"):
        score("write about the sea", letter(NEUTRAL_SENTENCE))


def test_odd_answers_cover_what_a_policy_could_try() -> None:
    rng = random.Random(5)
    marks = [compute_marks(LETTER, draw_varied_response(rng, LETTER)) for _ in range(400)]
    assert min(m.warmth for m in marks) < -0.9
    assert max(m.warmth for m in marks) > 0.9
    assert max(m.octaves_off for m in marks) > 2.5
    assert max(m.broken for m in marks) > 0.9
    assert max(m.repeated for m in marks) > 0.5
    assert 0.02 < statistics.mean(not m.closed for m in marks) < 0.3
    longest = write(rng, LETTER, MOODS[0], MAX_SENTENCES)
    assert all(0 < len(spoil(rng, longest).split()) <= MAX_NEW_TOKENS for spoil in DEGRADATIONS * 50)


def test_preparing_makes_models_that_fit_each_other_and_the_specs(prepared: Path) -> None:
    for name in ("sequential", "oppo", "rule", "grpo"):
        spec = load_yaml((EXAMPLES / f"{name}.yaml").read_text())
        assert (prepared.parent / spec.data.prompts).exists()
        for model in (spec.models.actor, spec.models.reward.model):
            folder = prepared.parent / str(model.path) if model else prepared / "actor"
            longest = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
            assert load_tiny(folder, "scalar").context >= longest
    assert len((prepared / "heldout.jsonl").read_text().splitlines()) == FAST.heldout_prompts


def test_even_a_short_training_makes_a_reward_model_that_beats_chance(prepared: Path) -> None:
    figures = json.loads((prepared / "report.json").read_text())["reward"]
    assert figures["pair_accuracy"] > 0.55
    assert figures["spearman_pairs"] > 0.2
    assert figures["actor_mean"] == pytest.approx(0, abs=1e-3)
    assert figures["actor_sd"] == pytest.approx(1, abs=1e-3)


def test_finished_stages_are_not_repeated(prepared: Path) -> None:
    written = (prepared / "report.json").stat().st_mtime_ns
    assert not prepare(prepared, FAST, lambda share, doing: pytest.fail("worked again"))
    assert (prepared / "report.json").stat().st_mtime_ns == written
    assert source_digest(FAST) != source_digest(replace(FAST, seed=1))


def test_other_settings_replace_the_result_as_a_whole(tmp_path: Path) -> None:
    out = tmp_path / "letters"
    tiny = replace(FAST, pretraining_answers=40, compared_prompts=8, sampled_answers=8, heldout_prompts=4, train_prompts=8)
    assert prepare(out, tiny, lambda share, doing: None)
    (out / "stray").write_text("from before")
    assert prepare(out, replace(tiny, seed=1), lambda share, doing: None)
    assert not (out / "stray").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["letters"]
    assert json.loads((out / "report.json").read_text())["settings"] == asdict(replace(tiny, seed=1))


def test_the_same_seed_makes_the_same_models(tmp_path: Path) -> None:
    tiny = Settings(pretraining_answers=40, compared_prompts=8, sampled_answers=8, heldout_prompts=4, train_prompts=8)
    for name in ("one", "other"):
        prepare(tmp_path / name, tiny, lambda share, doing: None)
    for model in ("actor", "reward"):
        files = [tmp_path / name / model / "model.safetensors" for name in ("one", "other")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_sequential_and_oppo_differ_in_name_and_overlap_only() -> None:
    def rest(spec: RunSpec) -> dict[str, object]:
        return spec.model_dump(exclude={"name", "overlap"})

    specs = [load_yaml((EXAMPLES / f"{name}.yaml").read_text()) for name in ("sequential", "oppo")]
    assert rest(specs[0]) == rest(specs[1])
    assert specs[1].overlap.overcommit.max <= specs[1].ppo.batch_size // 2


def test_rank_correlation() -> None:
    assert spearman([1, 2, 30], [4, 5, 6]) == pytest.approx(1)
    assert spearman([1, 2, 30], [6, 5, 4]) == pytest.approx(-1)


def test_a_word_without_a_token_is_named_with_its_line(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"prompt": "please write a letter about the xylophone"}\n')
    with pytest.raises(PromptError, match=r"line 1.*xylophone"):
        read_prompts(tmp_path / "odd.jsonl", "prompt", FileCodec(prepared / "actor"), 16)

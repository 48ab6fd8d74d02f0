"""A reward model that vLLM serves: what a grown answer costs, what its scores are, and how it fails."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.spec import ModelSpec, TinyArchitecture
from oppo_core.models.model_io import load_model
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.tiny_transformer import TinyTransformer, init_tiny
from oppo_core.ppo.batch_rows import BatchRows
from oppo_core.ppo.scored import Scored
from oppo_core.reporting.metrics import part_metrics
from oppo_core.rewards.composite import Part, RewardReader, Rewards
from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.protocol import Answer
from oppo_core.rewards.vllm_model import POOLING, PrefixReward, build_vllm_reward, check_classifier
from oppo_core.rollout.tokenizer import ByteCodec
from oppo_core.vllm.asyncio_thread import AsyncioThread
from oppo_core.vllm.engine_args import Placement, cpu_cache_bytes, reward_arguments
from tests.fakes.vllm_pooling_engine import BLOCK, FakePoolingEngine
from tests.processes import still_running

VOCAB, CODEC = 40, ByteCodec(40)
PATIENCE_S = 20.0
Make = Callable[..., PrefixReward]


@pytest.fixture
def make() -> Iterator[Make]:
    made = []

    def of(silence_s: float = PATIENCE_S, **more: Any) -> PrefixReward:
        made.append(
            PrefixReward(
                FakePoolingEngine(small_network(), **more), AsyncioThread(silence_s), BLOCK, parameters=lambda: dict(POOLING)
            )
        )
        return made[-1]

    yield of
    for reward in made:
        reward.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "oppo-vllm"]


def small_network() -> TinyTransformer:
    return init_tiny(TinyArchitecture(vocab=VOCAB, context=256, hidden=16, layers=2, heads=2), "scalar", 0).double()


def row(length: int, first: int = 3) -> NDArray[np.int64]:
    return np.asarray([first + i % 7 for i in range(length)], dtype=np.int64)


def answer(number: int, tokens: NDArray[np.int64], prompt: int = 5) -> Answer:
    return Answer(number, tokens[:prompt].tolist(), tokens[prompt:].tolist(), CODEC)


def one_shot(tokens: NDArray[np.int64]) -> float:
    """What a pass over the whole gives."""
    network = small_network()
    with torch.no_grad():
        hidden = network.hidden(torch.from_numpy(tokens)[None], torch.arange(len(tokens))[None])
        return float(network.scalar(hidden[0, -1]))


def fake_engine(reward: PrefixReward) -> FakePoolingEngine:
    assert isinstance(reward.engine, FakePoolingEngine)
    return reward.engine


def settle(reward: PrefixReward) -> None:
    """Wait until every reading that was begun is done: one more answer is scored after them."""

    async def idle() -> None:
        while any(state.in_flight or state.due() for state in reward._states.values()):
            await asyncio.sleep(0)

    reward._loop.run(idle(), "waiting")


def test_a_grown_answer_costs_its_new_blocks_and_its_score_is_that_of_one_pass(make: Make) -> None:
    reward, whole = make(), row(100)
    for length in (7, 15, 20, 30, 47, 64, 70, 99):
        reward.read_partial({4: whole[:length]})
        settle(reward)
    computed = [count for _, count in fake_engine(reward).computed]
    assert computed == [16, 16, 32, 32]  # whole blocks, each once: at 20, 47 (one new), 64, 99 tokens
    reward.start([answer(4, whole)], lambda: None)
    assert reward.wait([4], PATIENCE_S)
    assert fake_engine(reward).computed[-1][1] == 100 - 96
    assert reward.score(4) == pytest.approx(one_shot(whole), abs=1e-12)
    known, found = reward.cached(4)
    assert known == found == sum((16, 32, 64, 96))


def test_a_finished_answer_that_nobody_read_before_is_read_whole(make: Make) -> None:
    reward = make()
    rows = {i: row(10 + 9 * i, 3 + i) for i in range(5)}
    reward.start([answer(i, tokens) for i, tokens in rows.items()], lambda: None)
    assert reward.wait(list(rows), PATIENCE_S)
    for i, tokens in rows.items():
        assert reward.score(i) == pytest.approx(one_shot(tokens), abs=1e-12)
        assert reward.cached(i) == (0, 0)
    assert sorted(count for _, count in fake_engine(reward).computed) == [len(tokens) for tokens in rows.values()]


def test_evicted_prefix_is_prefilled_again_and_counted(make: Make) -> None:
    reward = make(blocks=4)
    rows = {i: row(80, 3 + i) for i in range(3)}
    for length in (32, 48, 64):
        for i, tokens in rows.items():
            reward.read_partial({i: tokens[:length]})
            settle(reward)
    reward.start([answer(i, tokens) for i, tokens in rows.items()], lambda: None)
    assert reward.wait(list(rows), PATIENCE_S)
    pairs = [reward.cached(i) for i in rows]
    assert sum(found for _, found in pairs) < sum(known for known, _ in pairs)
    scored = [Scored(reward.score(i), np.zeros(1), np.zeros(1), parts=(1.0,), cached=reward.cached(i)) for i in rows]
    assert 0 <= part_metrics(BatchRows([]), scored, 1)["oppo/reward_cached_share"] < 1
    assert part_metrics(BatchRows([]), [Scored(1.0, np.zeros(1), np.zeros(1), parts=(1.0,))], 1) == {}
    for i, tokens in rows.items():
        assert reward.score(i) == pytest.approx(one_shot(tokens), abs=1e-12)


def test_dropped_sequence_may_start_again(make: Make) -> None:
    reward, whole = make(), row(40)
    reward.read_partial({1: whole[:20]})
    reward.forget(1)
    reward.forget(2)  # never seen
    settle(reward)
    assert not reward.wait([1], 0.0)
    for _ in range(2):
        reward.start([answer(1, whole)], lambda: None)
        assert reward.wait([1], PATIENCE_S)
        assert reward.score(1) == pytest.approx(one_shot(whole), abs=1e-9)
        reward.forget(1)
        assert not reward.wait([1], 0.0)


def test_it_is_read_along_with_the_rest_of_a_reward(make: Make) -> None:
    """By the scorers' reader, with a streamed network beside it; interrupted in the middle."""

    def reader() -> RewardReader:
        served = make()
        parts = [Part(0.5, finished=served, streaming=served), Part(2.0, network=small_network())]
        return RewardReader(Rewards(parts, CODEC), 4, 128, PassBudget(400))

    tokens = {1: row(70), 2: row(33, 5)}
    first = reader()
    first.read({1: tokens[1][:40], 2: tokens[2]}, {1: 5, 2: 5}, {2}, set(), lambda: None)
    first.wait([2], lambda: None)
    second = reader()
    second.read({1: tokens[1][:40], 2: tokens[2]}, {1: 5, 2: 5}, {2}, set(), lambda: None)
    second.read({1: tokens[1]}, {1: 5}, {1}, set(), lambda: None)
    second.wait([1, 2], lambda: None)
    for i, scores in second.scores([1, 2]).items():
        assert scores == pytest.approx((one_shot(tokens[i]), one_shot(tokens[i])), abs=1e-9)
        assert second.total(scores) == pytest.approx(2.5 * one_shot(tokens[i]), abs=1e-9)
    assert set(first.cached([1, 2])) == {1, 2}


def test_vllm_scores_as_our_own_network_does_and_finds_the_cached_prefix(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed (make test-vllm)")
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=VOCAB, num_key_value_heads=2, num_labels=1, pad_token_id=0, **sizes)
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path)
    network = load_model(ModelSpec(path=str(tmp_path)), "scalar", [], torch.float32, 0)
    resource_tracker.ensure_running()  # of Python's multiprocessing: it ends with this process
    before = set(psutil.Process().children(recursive=True))
    on_gpu = torch.cuda.is_available()
    placement = Placement((0,), 0.3) if on_gpu else Placement(cache_bytes=cpu_cache_bytes(4, 128, 2 * 2 * 128 * 4))
    reward = build_vllm_reward(tmp_path, reward_arguments(str(tmp_path), "float32", 128, 4, placement), 600.0, placement)
    try:
        whole = row(100)
        for length in (40, 90):
            reward.read_partial({1: whole[:length]})
            settle(reward)
        reward.start([answer(1, whole)], lambda: None)
        while not reward.wait([1], PATIENCE_S):
            pass
        with torch.no_grad():
            hidden = network.hidden(torch.from_numpy(whole)[None], torch.arange(len(whole))[None])
        assert reward.score(1) == pytest.approx(float(network.scalar(hidden[0, -1])), abs=1e-3)
        assert reward.cached(1) == ((32 + 80, 32 + 80) if on_gpu else (32 + 64, 32 + 64))
    finally:
        reward.close()
    assert not still_running(before)


def test_a_dead_engine_is_an_error(make: Make) -> None:
    reward = make()
    fake_engine(reward).dead = True
    reward.start([answer(1, row(20))], lambda: None)
    with pytest.raises(RewardError, match="vLLM's reward model failed: EngineDead: the engine's process has ended"):
        reward.wait([1], PATIENCE_S)


def test_a_silent_engine_is_taken_for_hung(make: Make) -> None:
    reward = make(silence_s=0.02)
    fake_engine(reward).hangs = True
    reward.start([answer(1, row(20))], lambda: None)
    with pytest.raises(RewardError, match=r"has reported nothing for .* so it is assumed to hang"):
        reward.wait([1], 0.1)


def test_several_numbers_a_text_are_no_score(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = make()
    monkeypatch.setattr(fake_engine(reward), "_read", lambda tokens: torch.zeros(3))
    reward.start([answer(1, row(20))], lambda: None)
    with pytest.raises(RewardError, match="gives 3 numbers per text, not one"):
        reward.wait([1], PATIENCE_S)


@pytest.mark.parametrize(
    ("config", "fits"),
    [
        ({"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, True),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, False),
        ({"architectures": ["Qwen2ForCausalLM"], "num_labels": 1}, False),
        ({"num_labels": 1}, False),
    ],
)
def test_a_folder_that_is_no_model_of_one_score_is_refused(tmp_path: Path, config: dict[str, Any], fits: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"} | config))
    if fits:
        check_classifier(tmp_path)
        return
    with pytest.raises(ModelFolderError, match="needs a model for sequence classification"):
        check_classifier(tmp_path)

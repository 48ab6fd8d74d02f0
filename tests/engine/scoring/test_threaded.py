"""`ThreadedScorers`: bitwise equal results, error propagation, and shutdown."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from oppo_core.scoring.process import QUEUE_SIZE, ScorerError
from oppo_core.scoring.scorers import ScorerSet
from oppo_core.scoring.thread import ThreadedScorers
from oppo_core.trace.recorder import Recorder
from oppo_core.train import train

PATIENCE_S = 60.0
CPU = torch.device("cpu")


def in_a_thread(scorers: Any, trace: Recorder, silence_s: float = PATIENCE_S) -> ThreadedScorers:
    """`scorers` behind a thread, without a CUDA stream but with the GPU's order of calls."""

    def build(recorder: Recorder) -> ScorerSet:
        scorers.trace = recorder
        return scorers  # type: ignore[no-any-return]

    return ThreadedScorers(build, Recorder(("cpu:1",)), CPU, trace, silence_s)


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


EPOCHS = {"overlap": {"intra_step": "per_sequence"}, "ppo": {"epochs": 2, "mini_batches": 2}}


@pytest.mark.parametrize("changes", [{}, pytest.param(EPOCHS, marks=pytest.mark.full)], ids=["streamed", "per_sequence-epochs"])
def test_threaded_scorers_are_bitwise_equal_to_inline_ones(world: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    spec = world.spec({"steps": 2}, changes)
    plain = world.run(spec, tmp_path / "plain", inline=True)
    engine = world.assemble(spec, tmp_path / "aside")
    engine.layout = world.inline_streaming()
    engine.scorers = in_a_thread(engine.scorers, engine.trace)
    with world.recorded() as steps:
        train(engine, lambda: False)
    engine.scorers.close()
    engine.journal.close()
    assert "oppo-scorers" not in names_of_threads()
    for role in ("actor", "critic"):
        there = world.weights(tmp_path / "aside", role)
        assert all(torch.equal(weight, there[name]) for name, weight in plain.weights(role).items())
    assert [step.metrics["critic/vf_loss"] for step in steps] == [step.metrics["critic/vf_loss"] for step in plain.steps]
    assert engine.run_score.last_metrics["busy/cpu:1"] > 0, "what the thread did is not in the trace"


def test_every_pass_sends_a_heartbeat(world: Any, tmp_path: Path) -> None:
    """Otherwise an update of many passes would look hung."""
    spec = world.spec({"steps": 1}, EPOCHS, {"ppo": {"micro_batch_tokens": 100}})
    engine = world.assemble(spec, tmp_path)
    scorers, passes, signs = engine.scorers, [], []
    for name in ("reference", "critic"):
        network = getattr(scorers, name).network
        own = network.hidden
        network.hidden = lambda *given, own=own, name=name: (passes.append(name), own(*given))[1]
    scorers.alive = lambda: signs.append(len(passes))
    train(engine, lambda: False)
    scorers.close()
    engine.journal.close()
    assert passes.count("critic") > 8
    assert set(range(len(passes))) <= set(signs), "a pass without a heartbeat before it"


class Scripted:
    """Fake `ScorerSet` that fails or hangs on request."""

    saves_bytes = 0

    def __init__(self) -> None:
        self.trace = Recorder(("cpu:1",))
        self.alive: Any = None
        self.goes_on = threading.Event()
        self.began = threading.Event()
        self.done: list[str] = []

    def extend(self, deltas: list[Any], chunk: int) -> None:
        self.began.set()
        self.goes_on.wait(PATIENCE_S)
        if chunk == 7:
            raise ValueError("chunk 7 cannot be read")
        self.done.append(f"extend {chunk}")

    def start_collect(self, sequence_ids: list[int]) -> None:
        self.done.append("collect")

    def wait_collect(self) -> dict[int, Any]:
        return {}

    def close(self) -> None:
        self.done.append("closed")


def test_an_error_in_the_thread_ends_the_run_with_its_message() -> None:
    scripted = Scripted()
    scorers = in_a_thread(scripted, Recorder(("cpu:0",)))
    scorers.extend([], 7)
    scorers.start_collect([1])
    scripted.goes_on.set()
    with pytest.raises(ScorerError, match="ValueError: chunk 7 cannot be read"):
        scorers.wait_collect()
    with pytest.raises(ScorerError, match="chunk 7"):
        scorers.extend([], 8)
    scorers.close()
    assert scripted.done == ["closed"]
    assert "oppo-scorers" not in names_of_threads()


def test_a_full_queue_blocks_the_actor_and_loses_nothing() -> None:
    scripted, trace = Scripted(), Recorder(("cpu:0",))
    scorers = in_a_thread(scripted, trace)
    for chunk in range(10, 10 + QUEUE_SIZE + 1):
        scorers.extend([], chunk)
        assert scripted.began.wait(PATIENCE_S)  # the first one has left the queue
    assert not trace.waits
    more = threading.Thread(target=lambda: scorers.extend([], 99))
    more.start()
    scripted.goes_on.set()
    more.join(PATIENCE_S)
    scorers.start_collect([])
    scorers.wait_collect()
    scorers.close()
    assert scripted.done == [f"extend {chunk}" for chunk in [*range(10, 10 + QUEUE_SIZE + 1), 99]] + ["collect", "closed"]


def test_closing_drops_queued_calls() -> None:
    scripted = Scripted()
    scorers = in_a_thread(scripted, Recorder(("cpu:0",)))
    scorers.extend([], 1)
    assert scripted.began.wait(PATIENCE_S)
    scorers.extend([], 2)
    scorers._is_closing = True
    scripted.goes_on.set()
    scorers.close()
    assert scripted.done == ["extend 1", "closed"]


def test_a_thread_that_hangs_is_named() -> None:
    scripted = Scripted()
    with mock.patch("oppo_core.scoring.thread.POLL_S", 0.01), mock.patch("oppo_core.scoring.thread.SHUTDOWN_TIMEOUT_S", 0.01):
        scorers = in_a_thread(scripted, Recorder(("cpu:0",)), silence_s=0.05)
        scorers.extend([], 1)
        scorers.start_collect([])
        with pytest.raises(ScorerError, match=r"no sign of life for 0\.05 s"):
            scorers.wait_collect()
        scorers.close()
    scripted.goes_on.set()


def test_the_critics_forward_pass_needs_no_advantages_and_changes_no_bit(world: Any, tmp_path: Path) -> None:
    """It is sent before the proximal log-probs are computed; without it the update computes the same itself."""
    spec, order = world.spec({"steps": 2}), list[str]()
    with mock.patch.object(ScorerSet, "forward_critic"):
        late = world.run(spec, tmp_path / "late", inline=True)
    engine = world.assemble(spec, tmp_path / "early")
    engine.layout = world.inline_streaming()
    forward, logprobs, update = engine.scorers.trainer.forward, engine.actor.logprobs, engine.scorers.start_critic_update
    engine.scorers.trainer.forward = lambda *given: (order.append("critic forward"), forward(*given))[1]
    engine.actor.logprobs = lambda *given: (order.append("actor forward"), logprobs(*given))[1]
    engine.scorers.start_critic_update = lambda given: (order.append("critic update"), update(given))[1]
    train(engine, lambda: False)
    engine.scorers.close()
    engine.journal.close()
    assert order == ["critic forward", "actor forward", "critic update"] * 2
    there = world.weights(tmp_path / "early", "critic")
    assert all(torch.equal(weight, there[name]) for name, weight in late.weights("critic").items())

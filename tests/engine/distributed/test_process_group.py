"""Data-parallel runs on several ranks: collectives, equal results, checkpoints, and errors when a rank is lost."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from oppo_contract.events import parse_event
from oppo_core.checkpointing.save_restore import restore, verify
from oppo_core.distributed.process_group import (
    BLOCKING_WAIT,
    SINGLE,
    RankError,
    Ranks,
    Rendezvous,
    join,
    rendezvous_from_env,
)
from oppo_core.engine import step_report
from oppo_core.engine.build import assemble
from oppo_core.engine.state import Engine
from oppo_core.models.oom_retry import MemoryShortError
from oppo_core.ppo.actor import ActorTrainer
from oppo_core.ppo.experience import Experience
from oppo_core.reporting.event_log import NODE_EVENTS, Journal
from oppo_core.train import train
from oppo_core.training.optimizer import NonFiniteError
from oppo_core.training.process_group import join_default_group
from tests.fakes.thread_ranks import on_threads

CPU = torch.device("cpu")
Tree = dict[str, Any]
TWO: Tree = {"resources": {"nodes": 2, "devices": 2}, "steps": 3}
PLAIN: Tree = {"overlap": {"intra_step": "off", "inter_step": "off"}}
DEFER: Tree = {"overlap": {"intra_step": "per_chunk", "inter_step": "defer"}}


@dataclass(slots=True)
class Rank:
    """One rank of a run, and how it went."""

    engine: Engine | None = None
    reason: str = ""
    error: BaseException | None = None
    experiences: list[Experience] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    trained: list[list[int]] = field(default_factory=list)


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rendezvous_of(count: int, timeout_s: float = 30.0) -> list[Rendezvous]:
    """The rendezvous of each of `count` ranks in this process."""
    port = free_port()
    return [Rendezvous("127.0.0.1", port, rank, count, rank == 0, timeout_s) for rank in range(count)]


def on_ranks(count: int, work: Callable[[Ranks], Any], timeout_s: float = 30.0) -> list[Any]:
    """Run `work` on `count` ranks, each in a thread; their results, or the exceptions that ended them."""
    results: list[Any] = [None] * count

    def one(rendezvous: Rendezvous) -> None:
        try:
            ranks = join(rendezvous, "engine", CPU)
            results[rendezvous.rank] = work(ranks)
        except Exception as error:  # noqa: BLE001 - handed to the test
            results[rendezvous.rank] = error

    threads = [threading.Thread(target=one, args=(rendezvous,)) for rendezvous in rendezvous_of(count, timeout_s)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def trained_by(
    world: Any, spec: Any, out: Path, count: int = 2, resume: Path | None = None, inline: bool = False,
    stop_after: Callable[[int, int], bool] = lambda rank, chunks: False,
) -> list[Rank]:  # fmt: skip
    """Train on `count` ranks in this process. `stop_after(rank, chunks)`: whether to stop that rank after so many chunks."""
    results = [Rank() for _ in range(count)]
    plain = step_report.finish_step

    def finish_step(engine: Engine, batch: Any, experience: Experience, metrics: dict[str, float], window: Any) -> None:
        here = results[engine.ranks.rank]
        here.experiences.append(experience)
        here.metrics.append(dict(metrics))
        here.trained.append([s.sequence_id for s in batch.sequences])
        plain(engine, batch, experience, metrics, window)

    def work(ranks: Ranks) -> None:
        here, chunks = results[ranks.rank], itertools.count(1)
        try:
            journal = Journal(out / f"events-{ranks.rank}.jsonl", None if ranks.first else NODE_EVENTS)
            changes = verify(resume, spec, ranks) if resume is not None else []
            here.engine = assemble(spec, [world.folder], out, journal, 1, resume, ranks)
            if resume is not None:
                restore(here.engine, resume, changes)
            here.reason = train(here.engine, lambda: stop_after(ranks.rank, next(chunks)))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            here.error = error
            ranks.leave(f"{type(error).__name__}: {error}")
        finally:
            if here.engine is not None:
                here.engine.scorers.close()

    with mock.patch.object(step_report, "finish_step", finish_step), world.streaming_inline() if inline else nullcontext():
        for result in [work(SINGLE)] if count == 1 else on_ranks(count, work):
            assert result is None, result
    return results


def sound(results: list[Rank]) -> list[Rank]:
    """The ranks; raises the error of a failed one."""
    for rank in results:
        if rank.error is not None:
            raise rank.error
    return results


def weights(rank: Rank) -> dict[str, torch.Tensor]:
    """The actor's present weights."""
    assert rank.engine is not None
    return dict(rank.engine.actor.network.state_dict())  # type: ignore[attr-defined]


def critic_weights(rank: Rank) -> dict[str, torch.Tensor]:
    """The critic's present weights."""
    assert rank.engine is not None
    return dict(rank.engine.scorers.trainer.network.state_dict())  # type: ignore[attr-defined]


ORACLE: dict[str, Tree] = {
    "one-step": {},
    "mini-batches": {"ppo": {"mini_batches": 3, "epochs": 2}},
    "shaped": {
        "ppo": {"whiten_rewards": True, "normalize_scores": "running", "kl": {"controller": "adaptive"},
                "entropy_coefficient": 0.1, "pretraining": {"data": "texts.jsonl", "sequences": 3}, "ema_decay": 0.9},
    },
    "groups": {
        "ppo": {"algorithm": "grpo", "group_size": 2, "batch_size": 4, "critic_learning_rate": 1e-5},
        "models": {"critic": "actor"},
    },
    "update-overlap": {"overlap": {"intra_step": "per_chunk", "update_overlap": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", ORACLE)
def test_two_ranks_compute_what_one_process_does(world: Any, tmp_path: Path, name: str) -> None:
    changes = [PLAIN, ORACLE[name], {"steps": 3}]
    (one,) = sound(trained_by(world, world.spec(*changes), tmp_path / "one", 1, inline=name == "update-overlap"))
    two = sound(trained_by(world, world.spec(*changes, TWO), tmp_path / "two", inline=name == "update-overlap"))
    for rank in two:
        for key, value in weights(one).items():
            torch.testing.assert_close(weights(rank)[key], value, rtol=0, atol=1e-9)
        for ours, theirs in zip(rank.metrics, one.metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-7, abs=1e-9, nan_ok=True)
        for ours, theirs in zip(rank.experiences, one.experiences, strict=True):
            places = ours.batch.places
            assert [s.response for s in ours.sequences] == [theirs.sequences[place].response for place in places]
            for row, place in enumerate(places):
                length = ours.sequences[row].length
                torch.testing.assert_close(ours.advantages[row, :length], theirs.advantages[place, :length], rtol=0, atol=1e-9)
    for experiences in zip(*(rank.experiences for rank in two), strict=True):
        tokens = [[len(row) for row in e.tokens] for e in experiences]
        assert name == "update-overlap" or max(map(sum, tokens)) <= sum(map(sum, tokens)) / 2 + max(
            map(max, filter(None, tokens))
        )
        assert sorted(place for e in experiences for place in e.batch.places) == list(range(len(experiences[0].batch.sequences)))


def ranks_of(count: int) -> Tree:
    """So many ranks on this machine."""
    return {"resources": {"kind": "cpu", "processes": count}}


SAME: dict[str, Tree] = {
    "defer": {"ppo": {"mini_batches": 2, "epochs": 2}},
    "tail-batch": {"overlap": {"inter_step": "tail_batch"}},
    "groups": {
        "ppo": {"algorithm": "grpo", "group_size": 2, "batch_size": 5, "dynamic_sampling": 2, "critic_learning_rate": 1e-5,
                "score_clip": 0.1},
        "models": {"critic": "actor"},
    },
    "kept-caches": {"overlap": {"kv_after_update": "keep"}},
    "filters": {"rollout": {"top_k": 5}},
    "update-overlap": {"overlap": {"update_overlap": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_any_number_of_ranks_trains_the_same_responses(world: Any, tmp_path: Path, name: str) -> None:
    """One pool: the same batches in the same order, so the same weights; every response is trained once or in the pool."""
    changes = [DEFER, SAME[name], {"steps": 20 if name == "defer" else 6}]
    runs = [
        sound(trained_by(world, world.spec(*changes, ranks_of(count)), tmp_path / str(count), count, inline=True))
        for count in (1, 2, 3)
    ]
    (one,), *_ = runs
    assert one.engine is not None
    for rank in (rank for run in runs for rank in run):
        assert rank.engine is not None
        assert rank.trained == one.trained
        for trained_weights in [weights] if name == "groups" else [weights, critic_weights]:
            for key, value in trained_weights(one).items():
                torch.testing.assert_close(trained_weights(rank)[key], value, rtol=0, atol=1e-9)
        pool = rank.engine.pool
        left = [s.sequence_id for s in (*pool.sequences, *pool.queue)]
        trained = [i for batch in rank.trained for i in batch]
        assert len({*trained, *left}) == len(trained) + len(left)
        assert (len(trained) + len(left) < pool.started) == (name == "groups"), "lost; dynamic sampling drops groups"
        assert rank.engine.overcommit.overcommit == one.engine.overcommit.overcommit
    assert any(s.age or s.cohort < step for step, e in enumerate(one.experiences) for s in e.sequences)
    for run in runs[1:]:
        for trained_weights in [weights] if name == "groups" else [weights, critic_weights]:
            for key, value in trained_weights(run[0]).items():
                assert all(torch.equal(trained_weights(rank)[key], value) for rank in run), key
        parts = [{s.sequence_id for s in rank.engine.pool.sequences if s.remote_length is None} for rank in run if rank.engine]
        assert sorted(i for ids in parts for i in ids) == [s.sequence_id for s in one.engine.pool.sequences]


def test_pools_that_differ_end_the_run(world: Any, tmp_path: Path) -> None:
    plain = step_report.finish_step

    def finish_step(engine: Engine, *arguments: Any) -> None:
        plain(engine, *arguments)
        engine.overcommit.overcommit += engine.ranks.rank

    with mock.patch.object(step_report, "finish_step", finish_step):
        two = trained_by(world, world.spec(DEFER, TWO), tmp_path, inline=True)
    assert all(isinstance(rank.error, RankError) for rank in two)
    assert all(str(rank.error).startswith("the ranks' pools differ at step 2, ") for rank in two)


def test_a_stop_on_one_rank_ends_both_and_they_go_on_alike(world: Any, tmp_path: Path) -> None:
    spec = world.spec(DEFER, TWO, {"steps": 4, "checkpoints": {"every_steps": 2}})
    whole = sound(trained_by(world, spec, tmp_path / "whole", inline=True))
    halves: list[bool] = []
    for number, when in enumerate((3, 8, 13)):
        out = tmp_path / f"cut-{number}"
        cut = sound(trained_by(world, spec, out, inline=True, stop_after=lambda rank, n, when=when: rank == 1 and n >= when))
        assert {rank.reason for rank in cut} == {"asked to stop"}
        (newest,) = sorted((out / "checkpoints").iterdir())[-1:]
        assert (newest / "rank-1" / "state.json").is_file()
        halves.append("-chunk-" in newest.name)
        rest = sound(trained_by(world, spec, out, resume=newest, inline=True))
        for was, now, again in zip(whole, cut, rest, strict=True):
            assert now.trained + again.trained == was.trained
            for key, value in weights(was).items():
                torch.testing.assert_close(weights(again)[key], value, rtol=0, atol=1e-9)
    assert any(halves)  # stopped within a step


def test_a_checkpoint_between_two_steps_is_resumed_alike(world: Any, tmp_path: Path) -> None:
    spec = world.spec(DEFER, TWO, {"steps": 4, "checkpoints": {"every_steps": 2, "keep": 9}})
    whole = sound(trained_by(world, spec, tmp_path / "whole", inline=True))
    half = tmp_path / "whole" / "checkpoints" / "step-00000002"
    rest = sound(trained_by(world, spec, tmp_path / "rest", resume=half, inline=True))
    for was, again in zip(whole, rest, strict=True):
        assert again.trained == was.trained[2:]
        assert all(torch.equal(weights(again)[key], value) for key, value in weights(was).items())


HELD_OUT: Tree = {"evaluation": {"prompts": "prompts.jsonl", "every_steps": 2, "count": 5}}


@pytest.mark.parametrize("count", [5, 1])
def test_ranks_share_an_evaluation(world: Any, tmp_path: Path, count: int) -> None:
    changes = [PLAIN, HELD_OUT, {"evaluation": {"count": count}, "steps": 2}]
    (one,) = sound(trained_by(world, world.spec(*changes), tmp_path / "one", 1))
    two = sound(trained_by(world, world.spec(*changes, TWO, {"steps": 2}), tmp_path / "two"))
    assert one.engine is not None
    for rank in two:
        assert rank.engine is not None
        for name, value in one.engine.run_score.last_metrics.items():
            if name.startswith("eval/"):
                assert rank.engine.run_score.last_metrics[name] == pytest.approx(value, rel=1e-9, nan_ok=True), name


def test_a_fault_on_one_rank_is_one_of_both(world: Any, tmp_path: Path) -> None:
    spec = world.spec(PLAIN, TWO, {"ppo": {"on_nonfinite": "skip"}, "steps": 4, "checkpoints": {"every_steps": 1}})
    faults, plain = [True], ActorTrainer.accumulate

    def accumulate(self: ActorTrainer, *arguments: Any, **more: Any) -> None:
        plain(self, *arguments, **more)
        if self.ranks.rank == 1 and arguments[-1] == 1 and faults:
            faults.clear()
            raise NonFiniteError("the policy loss is nan")

    with mock.patch.object(ActorTrainer, "accumulate", accumulate):
        two = sound(trained_by(world, spec, tmp_path))
    assert [len(rank.trained) for rank in two] == [3, 3]
    assert all(rank.engine is not None and rank.engine.progress.nonfinite_steps == 1 for rank in two)
    assert all(torch.equal(weights(two[1])[key], value) for key, value in weights(two[0]).items())
    events = [parse_event(line) for line in (tmp_path / "events-0.jsonl").read_bytes().splitlines()]
    (said,) = [event for event in events if event.kind == "decision" and event.controller == "nonfinite"]
    assert said.reason == "skip: rank 1: the policy loss is nan"
    assert {parse_event(line).kind for line in (tmp_path / "events-1.jsonl").read_bytes().splitlines()} <= set(NODE_EVENTS)


def test_a_rank_that_runs_out_of_memory_makes_its_own_passes_smaller(world: Any, tmp_path: Path) -> None:
    """Passes contain no collectives, so only this rank's budget shrinks; rank 0 reports it."""
    spec = world.spec(PLAIN, TWO, {"steps": 1})
    apart, plain = sound(trained_by(world, spec, tmp_path / "plain")), ActorTrainer.accumulate

    def accumulate(self: ActorTrainer, *arguments: Any, **more: Any) -> None:
        plain(self, *arguments, **more)
        if self.ranks.rank == 1 and self.budget.tokens > 100:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with mock.patch.object(ActorTrainer, "accumulate", accumulate):
        two = sound(trained_by(world, spec, tmp_path / "short"))
    assert [rank.engine and rank.engine.progress.passes for rank in two] == [{}, {"actor": 100}]
    for rank in two:
        for key, value in weights(apart[0]).items():
            torch.testing.assert_close(weights(rank)[key], value, rtol=0, atol=1e-9)
    events = [parse_event(line) for line in (tmp_path / "short" / "events-0.jsonl").read_bytes().splitlines()]
    said = [(event.old, event.new, event.reason) for event in events if event.kind == "decision" and event.controller == "memory"]
    reason = "rank 1: the actor's update ran out of memory: tried to allocate 2 GiB"
    assert said == [(400, 200, reason), (200, 100, reason)]


@pytest.mark.full
def test_sharded_ranks_end_in_clear_words_when_one_runs_out_of_memory(world: Any, tmp_path: Path) -> None:
    """Every rank must run the same number of passes."""
    spec, plain = world.spec(PLAIN, TWO, {"steps": 1}), ActorTrainer.accumulate

    def accumulate(self: ActorTrainer, *arguments: Any, **more: Any) -> None:
        plain(self, *arguments, **more)
        self.budget.may_shrink = False  # as with DeepSpeed
        if self.ranks.rank == 1:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with mock.patch.object(ActorTrainer, "accumulate", accumulate):
        first, second = trained_by(world, spec, tmp_path)
    assert isinstance(second.error, MemoryShortError)
    assert isinstance(first.error, RankError)
    assert "the actor's update ran out of memory: tried to allocate 2 GiB" in str(first.error)
    assert "lower ppo.micro_batch_tokens" in str(first.error)


def check_even(number: int) -> None:
    """Raises ValueError for an odd number."""
    if number % 2:
        raise ValueError("odd")


@pytest.mark.parametrize("run", [on_ranks, on_threads])
def test_collectives(run: Callable[[int, Callable[[Ranks], Any]], list[Any]]) -> None:
    def work(ranks: Ranks) -> Any:
        tensors = [torch.full((3,), float(ranks.rank)), torch.ones(2, 2, dtype=torch.float64), torch.full((1,), 2.0)]
        ranks.all_reduce(tensors)
        with pytest.raises(ValueError, match=r"^rank 1: odd$"), ranks.raise_on_all(ValueError):
            check_even(ranks.rank)
        told = ranks.all_gather(b"x" * ranks.rank)
        return (
            [t.flatten().tolist() for t in tensors],
            told,
            ranks.total([1.0, ranks.rank]),
            ranks.any(ranks.rank == 2),
            ranks.exchange([bytes([ranks.rank]) * target for target in range(3)]),
            (ranks.total_counts([1, ranks.rank]), ranks.largest([-1.0, ranks.rank])),
        )

    results = run(3, work)
    assert [result[:4] for result in results] == [([[3.0] * 3, [3.0] * 4, [6.0]], [b"", b"x", b"xx"], [3.0, 3.0], True)] * 3
    assert [result[4] for result in results] == [[b""] * 3, [b"\0", b"\1", b"\2"], [b"\0\0", b"\1\1", b"\2\2"]]
    assert [result[5] for result in results] == [([3, 3], [-1.0, 2.0])] * 3


def test_a_rank_that_leaves_or_is_silent_is_named() -> None:
    def leaves(ranks: Ranks) -> None:
        if ranks.rank == 1:
            ranks.leave("RewardError: no answer")
            ranks.close()
            return
        ranks.any(False)

    lost = on_ranks(2, leaves)[0]
    assert isinstance(lost, RankError)
    assert str(lost) == "rank 0 of 2, all-reduce: rank 1 has ended: RewardError: no answer"
    held = threading.Event()

    def falls_silent(ranks: Ranks) -> None:
        if ranks.rank == 1:
            held.wait(30)
            return
        try:
            ranks.any(False)
        finally:
            held.set()

    with mock.patch("oppo_core.distributed.process_group.EXIT_REASON_TIMEOUT_S", 0.2):
        silent = on_ranks(2, falls_silent, timeout_s=1.0)[0]
    assert isinstance(silent, RankError)
    assert str(silent) == "rank 0 of 2, all-reduce: rank 1 died, or gave no sign of life for 1 s"


@pytest.mark.parametrize("given", [None, "1"])
def test_only_the_default_nccl_group_has_torchs_watchdog(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    """A group reads the variable when it is made. FSDP2 and DeepSpeed make more groups later."""
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    if given is not None:
        monkeypatch.setenv(BLOCKING_WAIT, given)
    made: dict[str, str | None] = {}
    nccl, gpu = mock.Mock(side_effect=lambda *_: made.setdefault("ours", os.environ.get(BLOCKING_WAIT))), torch.device("cuda")

    def initialize(backend: str, **_: Any) -> None:
        made[backend] = os.environ.get(BLOCKING_WAIT)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "init_process_group", initialize)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    (rendezvous,) = rendezvous_of(1)
    ranks = join(rendezvous, "engine", gpu)
    assert os.environ.get(BLOCKING_WAIT) == given
    assert join_default_group(gpu, ranks) == "nccl"
    assert os.environ.get(BLOCKING_WAIT) == given
    assert made == {"ours": "1", "nccl": None}
    ranks.close()


def test_the_number_of_ranks_must_be_the_specs() -> None:
    assert rendezvous_from_env(1, 1, 10.0, {}) is None
    environ = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert rendezvous_from_env(2, 1, 10.0, environ) == Rendezvous("h", 7, 1, 2, False, 10.0)
    both = environ | {"LOCAL_WORLD_SIZE": "2"}
    assert rendezvous_from_env(1, 2, 10.0, both) == Rendezvous("h", 7, 1, 2, False, 10.0, 2)
    with pytest.raises(RankError, match=r"2 ranks, 1 on each of 2 nodes, but 1 ranks were started; start"):
        rendezvous_from_env(2, 1, 10.0, {})
    with pytest.raises(RankError, match=r"1 ranks, 1 on each of 1 nodes, but 2 ranks were started; start"):
        rendezvous_from_env(1, 1, 10.0, environ)
    with pytest.raises(RankError, match=r"1 on each of 2 nodes, but 2 ranks were started, 2 of them here; start"):
        rendezvous_from_env(2, 1, 10.0, both)

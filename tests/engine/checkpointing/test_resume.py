"""A run that is interrupted ends as if it had not been.

From a checkpoint on schedule it ends with the same bits, from one in the middle of a step with results that are equal up to
rounding: the same tokens, and weights within 1e-9 in float64.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from safetensors.torch import load_file

from oppo_contract.events import parse_event
from oppo_core.checkpointing.atomic_dir import MANIFEST, CheckpointError, sha256
from oppo_core.checkpointing.save_restore import verify
from oppo_core.reporting.event_log import Journal
from oppo_core.scoring.early import EarlyBatch, EarlyScorers
from oppo_core.train import resume_step
from oppo_core.update import overlapped
from tests.engine.conftest import newest, streaming_inline
from tests.processes import gone

STEPS, EVERY = 16, 4
COMMON = {"steps": STEPS, "checkpoints": {"every_steps": EVERY, "keep": 2}, "resources": {"dtype": "float64"}}
# State that a checkpoint must hold besides weights, moments and the pool.
CARRIED = {
    "normalize_scores": "running", "schedule": "cosine", "value_warmup_steps": 2, "ema_decay": 0.9,
    "pretraining": {"data": "texts.jsonl", "sequences": 4},
}  # fmt: skip
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "sequential": ({"overlap": {"intra_step": "off", "inter_step": "off"}, "ppo": {"epochs": 2, "mini_batches": 2} | CARRIED}, 1),
    "groups": (
        {
            "ppo": {"algorithm": "grpo", "group_size": 3, "batch_size": 2, "critic_learning_rate": 1e-5},
            "models": {"critic": "actor"},
            "overlap": {"overcommit": {"initial": 1, "max": 2}},
        },
        2,
    ),
    "tail batch": ({"overlap": {"inter_step": "tail_batch"}}, 2),
    "oppo": (
        {
            "overlap": {"intra_step": "per_chunk", "inter_step": "defer", "overcommit": {"min": 3}},
            "ppo": {"kl": {"controller": "adaptive"}, "ema_decay": 0.9},
        },
        2,
    ),
    "sharded": (
        {
            "training": {"backend": "fsdp2"},
            "overlap": {"inter_step": "defer", "overcommit": {"min": 3}},
            "ppo": {"epochs": 2, "mini_batches": 2},
        },
        1,
    ),
}
# Files of keys and values, of which a checkpoint needs those only that outlive an update.
CACHES = ("decoder.safetensors", "scorers.safetensors", "evaluation.safetensors", "kept-cache.safetensors")
# Metrics that tell of time, and so differ from run to run.
TIMED = ("timing_s/", "perf/", "busy/", "bubble/", "idle_s/", "overlap_factor")


@pytest.fixture(
    scope="module", params=[name if name == "oppo" else pytest.param(name, marks=pytest.mark.full) for name in sorted(MODES)]
)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(world: Any, mode: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    changes, threads = MODES[mode]
    return world.run(world.spec(COMMON, changes), tmp_path_factory.mktemp(mode), threads=threads)


def learned(events: list[Any]) -> dict[tuple[int, str], float]:
    """Every metric of every step but those of time; a later report of a step replaces an earlier one."""
    steps = {event.step: event.metrics for event in events if event.kind == "step"}
    return {(step, k): v for step, metrics in steps.items() for k, v in metrics.items() if not k.startswith(TIMED)}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], exact: bool) -> bool:
    """To the last bit, or within 1e-9."""
    if exact:
        return same_bits(one, other)
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], rtol=0, atol=1e-9) for name in one)


def kill_at(world: Any, tree: Any, out: Path, threads: int, step: int, resume: Path | None = None) -> None:
    """SIGKILL the engine after it told of `step`; its scorers must end by themselves."""
    engine = world.start(tree, out, threads, resume)
    engine.step(step)
    below = psutil.Process(engine.process.pid).children(recursive=True)
    assert len(below) >= threads - 1, "no scorer process was running"
    os.kill(engine.process.pid, signal.SIGKILL)
    assert engine.end()[0] == -signal.SIGKILL
    _, left = psutil.wait_procs(below, timeout=30)
    assert all(gone(process) for process in left), "a process outlived the engine"


def check_against(undisturbed: Any, world: Any, out: Path, events: list[Any], exact: bool = True) -> None:
    """The same weights and the same metrics, to the last bit or nearly so, and events numbered without a gap."""
    for role in ("actor", "critic"):
        if role == "actor" or undisturbed.engine.spec.ppo.has_critic:
            assert same_weights(undisturbed.weights(role), world.weights(out, role), exact), role
    if undisturbed.engine.spec.ppo.ema_decay is not None:
        averages = [load_file(newest(folder) / "actor-ema" / "model.safetensors") for folder in (undisturbed.out, out)]
        assert same_weights(*averages, exact)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    ours, wanted = learned(events), learned(undisturbed.events)
    if not exact:
        assert ours == pytest.approx(wanted, rel=1e-7, abs=1e-9, nan_ok=True)
        return
    told, expected = ({key: repr(value) for key, value in metrics.items()} for metrics in (ours, wanted))
    assert {key: (told.get(key), expected.get(key)) for key in told | expected if told.get(key) != expected.get(key)} == {}


def test_killed_and_resumed_ends_with_the_same_bits(world: Any, mode: str, undisturbed: Any, tmp_path: Path) -> None:
    changes, threads = MODES[mode]
    tree = world.tree(COMMON, changes)
    # In the background, a checkpoint is published at the latest when the next one is due.
    first = 2 * EVERY if mode == "sharded" else EVERY
    kill_at(world, tree, tmp_path, threads, random.Random(mode).randrange(first + 1, STEPS - EVERY))
    start = newest(tmp_path)
    state = json.loads((start / "state.json").read_text())
    carried, defers = state["pool"], mode in ("oppo", "groups", "sharded")
    assert bool(carried) == defers, "the checkpoint should hold half-finished answers exactly when some are deferred"
    assert any(row["response"] and not row["finished"] for row in carried) == defers
    assert bool(state["queue"]) == (mode == "tail batch")
    resumed = world.start(tree, tmp_path, threads, resume=start)
    status, errors = resumed.end()
    assert status == 0, errors
    starts = [event.start_step for event in resumed.events if event.kind == "started"]
    assert starts == [0, int(start.name.removeprefix("step-"))]
    assert resumed.events[-1].outcome == "succeeded"
    check_against(undisturbed, world, tmp_path, resumed.events)


@pytest.mark.full
def test_a_fork_trains_on_with_the_bits_of_the_run_that_it_came_from(
    world: Any, mode: str, undisturbed: Any, tmp_path: Path
) -> None:
    """Another folder, name and journal; weights, optimizers, answers in flight and cursors are the checkpoint's."""
    changes, threads = MODES[mode]
    start = sorted((undisturbed.out / "checkpoints").glob("step-*"))[0]
    step = int(start.name.removeprefix("step-"))
    assert 0 < step < STEPS
    forked = world.start(world.tree(COMMON, changes) | {"name": "forked"}, tmp_path, threads, resume=start)
    status, errors = forked.end()
    assert status == 0, errors
    assert [event.start_step for event in forked.events if event.kind == "started"] == [step]
    for role in ("actor", "critic"):
        if role == "actor" or undisturbed.engine.spec.ppo.has_critic:
            assert same_bits(undisturbed.weights(role), world.weights(tmp_path, role)), role
    ours, wanted = learned(forked.events), learned(undisturbed.events)
    assert {at for at, _ in ours} == set(range(step + 1, STEPS + 1))
    expected = {key: value for key, value in wanted.items() if key[0] > step}
    assert {key: repr(value) for key, value in ours.items()} == {key: repr(value) for key, value in expected.items()}
    assert start.is_dir(), "a fork deletes nothing of the run that it came from"


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again(world: Any, mode: str, undisturbed: Any, tmp_path: Path, seed: int) -> None:
    changes, threads = MODES[mode]
    tree, draw, resume, step = world.tree(COMMON, changes), random.Random(seed), None, 0
    while step < STEPS - EVERY:
        step = draw.randrange(max(step, 2 * EVERY if mode == "sharded" else EVERY) + 1, STEPS)
        kill_at(world, tree, tmp_path, threads, step, resume)
        resume = newest(tmp_path)
    resumed = world.start(tree, tmp_path, threads, resume)
    assert resumed.end()[0] == 0
    check_against(undisturbed, world, tmp_path, resumed.events)


def test_asked_to_stop_it_saves_the_half_done_step_and_ends_with_the_same_results(
    world: Any, mode: str, undisturbed: Any, tmp_path: Path
) -> None:
    """SIGTERM, wherever it comes: the chunk is finished, everything in flight is saved, `stopped`, status 0."""
    changes, threads = MODES[mode]
    tree = world.tree(COMMON, changes)
    engine = world.start(tree, tmp_path, threads)
    engine.step(EVERY + 1)
    engine.process.send_signal(signal.SIGTERM)
    status, errors = engine.end()
    assert status == 0, errors
    last, saved = engine.events[-1], engine.events[-2]
    told = max(event.step for event in engine.events if event.kind == "step")
    assert (last.kind, last.outcome, last.step) == ("finished", "stopped", told)
    assert EVERY < told < STEPS, "it should have stopped early"
    assert (saved.kind, saved.step) == ("checkpoint", told)
    assert newest(tmp_path) == tmp_path / saved.folder
    status, events = world.main(tree, tmp_path, "--resume-from", newest(tmp_path), threads=threads)
    assert (status, events[-1].outcome) == (0, "succeeded")
    check_against(undisturbed, world, tmp_path, events, exact=False)


INTERRUPTED: dict[str, dict[str, Any]] = {
    "sequential": {
        "overlap": {"intra_step": "off", "inter_step": "off"},
        "evaluation": {"prompts": "prompts.jsonl", "every_steps": 3},
    },
    "filtered-tail-batch": {
        "overlap": {"inter_step": "tail_batch"},
        "rollout": {"top_p": 0.9},
    },
    "kept": {
        "overlap": {"kv_after_update": "keep"},
        "rollout": {"top_k": 35, "stop_texts": ["w11 w2"]},
    },
    "kept-update": {"overlap": {"kv_after_update": "keep", "update_overlap": True}, "rollout": {"min_p": 0.001}},
    "rloo": {
        "ppo": {"algorithm": "rloo", "group_size": 3, "batch_size": 2, "critic_learning_rate": 1e-5},
        "models": {"critic": "actor"},
        "overlap": {"overcommit": {"initial": 2, "max": 2}},
    },
    "update-overlap": {"overlap": {"update_overlap": True}, "ppo": {"entropy_coefficient": 0.01}},
}
QUICK = ("filtered-tail-batch", "kept", "update-overlap")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in INTERRUPTED])
def test_stopped_at_every_chunk_it_ends_with_the_same_results(world: Any, tmp_path: Path, name: str) -> None:
    """Every chunk in an engine of its own; some chunks end a step, and every other step a scheduled checkpoint is written."""
    short = {"steps": 4, "checkpoints": {"every_steps": 2, "keep": 100}}
    spec = world.spec(short, {"overlap": {"chunk": {"size": 16}}}, INTERRUPTED[name])
    streamed = spec.overlap.intra_step != "off"
    early = mock.patch.object(EarlyScorers, "train_early", autospec=True, side_effect=EarlyScorers.train_early)
    with mock.patch.object(overlapped, "MIN_PASS_TOKENS", 20):
        plain = world.run(spec, tmp_path / "plain", inline=streamed)
        trained_early = early.start()
        run, attempts, carried = None, 0, set()
        while run is None or run.reason != "all steps are done":
            resume = newest(run.out) if run is not None else None
            run = world.run(spec, tmp_path / "stopped", inline=streamed, resume=resume, should_stop=lambda: True)
            attempts += 1
            carried |= {s.age for s in run.engine.pool.sequences if s.length and not s.finished}
        early.stop()
    halves = [folder for folder in (run.out / "checkpoints").iterdir() if "chunk" in folder.name]
    assert len(halves) >= spec.steps, "hardly a step was cut"
    assert attempts >= len(halves)
    assert (max(carried) > 0) == (spec.overlap.inter_step == "defer"), "deferred answers should have been in flight"
    assert (trained_early.call_count > 0) == spec.overlap.update_overlap, "nothing was trained early before a stop"
    assert not any(file.name.endswith(CACHES) for folder in halves for file in folder.iterdir()) or name.startswith("kept")
    check_against(plain, world, run.out, run.events, exact=False)


def test_a_half_done_step_of_format_5_goes_on_without_its_caches(world: Any, tmp_path: Path) -> None:
    """As earlier versions wrote it: caches in files of their own, the decoder's counts beside them, a setting that is gone."""
    spec = world.spec({"steps": 2})
    plain = world.run(spec, tmp_path / "plain", inline=True)
    world.run(spec, tmp_path / "run", inline=True, should_stop=lambda: True)
    folder = newest(tmp_path / "run")
    state = json.loads((folder / "state.json").read_text())
    half = state["suspended"]["batch"]
    counts = {name: half.pop(name) for name in ("rounds", "decoded")}
    half |= {"decoder": counts | {"guessed": 0, "confirmed": 0, "live": [], "last": [], "ahead": []}, "update": {}}
    state["suspended"] |= {"remote": True, "told": {"0": [9, False]}}
    state["turns"] = {"rank": 0, "world": 1, "begun": 0, "owed": [], "taken": state.pop("prompts")["next_group"]}
    state["spec"]["overlap"]["drafter"] = {"max_rows": 2, "tokens": 4, "match": 2}
    (folder / "state.json").write_text(json.dumps(state | {"format": 5}))
    for name in ("decoder.safetensors", "scorers.safetensors", "scorers.json"):
        (folder / name).write_text("not looked at")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    manifest = {str(path.relative_to(folder)): {"sha256": sha256(path), "bytes": path.stat().st_size} for path in files}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    run = world.run(spec, tmp_path / "run", inline=True, resume=folder)
    assert run.engine.changes == []
    check_against(plain, world, run.out, run.events, exact=False)


def test_every_kept_checkpoint_is_whole_and_only_the_newest_are_kept(undisturbed: Any) -> None:
    folders = sorted((undisturbed.out / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == [f"step-{step:08d}" for step in (STEPS - EVERY, STEPS)]
    for folder in folders:
        verify(folder, undisturbed.engine.spec)
    with pytest.raises(CheckpointError):
        verify(folders[0].parent, undisturbed.engine.spec)
    told = [event.step for event in undisturbed.events if event.kind == "checkpoint"]
    assert told == list(range(EVERY, STEPS + 1, EVERY))


def test_a_torn_last_line_is_cut_and_numbering_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    for step in (1, 2):
        journal.write("decision", step=step, controller="chunk", old=1, new=2, reason="Δ ≥ 1")
    journal.close()
    whole = path.read_bytes()
    for torn in (whole[:-1], whole[:-20], whole + b"{", whole + b'{"kind": "step", "prod', whole[: whole.index(b"\n") + 1]):
        path.write_bytes(torn)
        journal = Journal(path)
        journal.write("decision", step=3, controller="chunk", old=2, new=2, reason="kept")
        journal.close()
        events = [parse_event(line) for line in path.read_bytes().splitlines()]
        assert [event.seq for event in events] == list(range(1, torn.count(b"\n") + 2))
        assert events[-1].step == 3


def test_changed_settings_take_effect_on_what_was_in_flight(world: Any, tmp_path: Path) -> None:
    """Stopped half-way and resumed with other bounds, chunks and KL coefficient: nothing is lost or trained twice."""
    first = {"steps": 3, "ppo": {"kl": {"coefficient": 0.1}}}
    stopped = world.run(world.spec(first), tmp_path, inline=True, should_stop=lambda: True)
    assert stopped.engine.batch is not None
    changed = {"steps": 3, "overlap": {"chunk": {"size": 5}, "overcommit": {"controller": "fixed", "initial": 4}}}
    resumed = world.run(world.spec(changed), tmp_path, inline=True, resume=newest(tmp_path))
    assert [step.kl_coefficient for step in resumed.steps] == [0.05] * 3
    steps = [event.metrics for event in resumed.events if event.kind == "step"]
    told = [(metrics["oppo/chunk_size"], metrics["oppo/overcommit"]) for metrics in steps]
    assert told == [(5, 3), (5, 4), (5, 4)], "the step under way was filled for the old Δ"
    trained = [i for step in resumed.steps for i in step.tokens]
    left = [s.sequence_id for s in resumed.engine.pool.sequences]
    assert sorted(trained + left) == list(range(resumed.engine.pool.started))


def test_a_coefficient_that_was_steered_is_the_specs_again_once_it_is_fixed(world: Any, tmp_path: Path) -> None:
    kl = {"coefficient": 0.1, "controller": "adaptive", "horizon": 8}
    steered = world.run(world.spec({"steps": 2, "ppo": {"kl": kl}}), tmp_path, inline=True)
    assert steered.engine.progress.kl_coefficient != 0.1
    resumed = world.run(
        world.spec({"steps": 3, "ppo": {"kl": {"coefficient": 0.1}}}), tmp_path, inline=True, resume=newest(tmp_path)
    )
    assert [step.kl_coefficient for step in resumed.steps] == [0.1]


def test_scorers_know_the_stop_condition_after_a_resume(world: Any, tmp_path: Path) -> None:
    rollout = {"stop_tokens": [9, 17, 20], "max_new_tokens": 40}
    spec = world.spec({"rollout": rollout, "overlap": {"chunk": {"size": 1}}})
    stopped = world.run(spec, tmp_path, inline=True, should_stop=lambda: True)
    while not any(s.stopped for s in stopped.engine.pool.sequences):
        stopped = world.run(spec, tmp_path, inline=True, resume=newest(tmp_path), should_stop=lambda: True)
        assert stopped.engine.progress.step == 0, "no answer was stopped"
    told = {s.sequence_id: s.stopped for s in stopped.engine.pool.sequences if s.length}
    with streaming_inline():
        engine = world.assemble(spec, tmp_path, resume=newest(tmp_path))
    assert engine.batch is not None
    resume_step(engine, engine.batch, engine.progress.step)
    assert {i: track.stopped for i, track in engine.scorers.sequences.items()} == told
    engine.journal.close()


def test_an_actor_that_rests_after_all_is_not_trained_early(world: Any, tmp_path: Path) -> None:
    """Stopped after its partner began to train the actor, and resumed with a longer warm-up of the critic: as without overlap."""
    early = {"steps": 4, "overlap": {"chunk": {"size": 16}, "update_overlap": True}, "ppo": {"entropy_coefficient": 0.01}}
    orders: list[EarlyBatch] = []

    def train_early(scorers: EarlyScorers, order: EarlyBatch) -> None:
        orders.append(order)
        plainly(scorers, order)

    plainly = EarlyScorers.train_early
    with (
        mock.patch.object(overlapped, "MIN_PASS_TOKENS", 20),
        mock.patch.object(EarlyScorers, "train_early", train_early),
    ):
        run = world.run(world.spec(early), tmp_path / "a", inline=True, should_stop=lambda: True)
        while not (run.engine.batch is not None and orders):
            orders.clear()
            resume = newest(tmp_path / "a")
            run = world.run(world.spec(early), tmp_path / "a", inline=True, resume=resume, should_stop=lambda: True)
        folder, step = newest(tmp_path / "a"), run.engine.progress.step
        assert "-chunk-" in folder.name
        rest = {"ppo": {"value_warmup_steps": step + 1}}
        ours = world.run(world.spec(early, rest), tmp_path / "ours", inline=True, resume=folder)
        plain = {"overlap": {"update_overlap": False, "intra_step": "off"}}
        theirs = world.run(world.spec(early, rest, plain), tmp_path / "theirs", resume=folder)
    assert len(ours.steps) == 4 - step >= 2
    for role in ("actor", "critic"):
        for name, weight in theirs.weights(role).items():
            torch.testing.assert_close(ours.weights(role)[name], weight, rtol=0, atol=1e-9)

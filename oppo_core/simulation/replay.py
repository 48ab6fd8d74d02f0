"""A recorded run replayed on virtual devices: the same answers, Δ and C per step, under given costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oppo_contract.events import SpansEvent
from oppo_contract.spec import load_spec
from oppo_core.control.controllers import ChunkState
from oppo_core.engine import step_report
from oppo_core.engine.state import Engine
from oppo_core.rollout.prompts import PromptStream
from oppo_core.simulation.assemble import MemoryJournal, PricedPrompts, assemble
from oppo_core.simulation.lengths import recorded_lengths
from oppo_core.simulation.recording import Key, Recording, spans_by_key
from oppo_core.train import train_step
from oppo_estimate.devices import ACTOR_GROUP, Costs, Decode, Devices, Overheads, Reading, Training
from oppo_estimate.schedules import shortened, variant

SECOND_US = 1e6
# Speed-up of a second core, measured (docs/simulation.md, "A recorded run"): a recording has one number of cores only.
DECODE_PARALLEL, PASS_PARALLEL = 0.35, 0.6
SCORERS = "scorers"


def devices_like(recording: Recording) -> Devices:
    """The devices of a recorded run, with every cost one second.

    Of n devices that every role used, n − n ÷ 2 are the actor's with streaming, as in `oppo_core.engine.layout.build_layout`.
    """
    actor, scorers = recording.devices_of("actor"), recording.devices_of("critic")
    everything = recording.started.devices
    separate = [device for device in scorers if device not in actor]
    placed = _placed(len(everything), len(actor) if separate else None)
    kind = everything[0].rpartition(":")[0]
    one, reading = SECOND_US, Reading(pass_us=SECOND_US, token_us=SECOND_US, parallel=PASS_PARALLEL)
    training = Training(pass_us=one, token_us=one, backward_us=one, optimizer_us=one, parallel=PASS_PARALLEL)
    one_device = recording.decodes_on < len(actor)
    decode = Decode(round_us=one, row_us=one, cached_token_us=one, parallel=0 if one_device else DECODE_PARALLEL)
    return Devices(
        name="recorded", kind=kind, **placed, without_streaming="share",
        overheads=Overheads(prompt_us=one, score_us=one, advantage_us=one, report_us=one),
        costs=Costs(decode=decode, actor=training, reward=reading, reference=reading, critic=training),
    )  # fmt: skip


def _placed(count: int, actors: int | None = None) -> dict[str, Any]:
    """Of `count` devices the actor's (default: the larger half) and the others'."""
    actors = max(1, count - count // 2) if actors is None else actors
    groups = {SCORERS: count - actors} if count > actors else {}
    place = SCORERS if groups else ACTOR_GROUP
    return {"actor": actors, "groups": groups, "place": dict.fromkeys(("reward", "reference", "critic"), place)}


def with_count(devices: Devices, count: int) -> Devices:
    """As many devices of the same kind and costs, divided among the roles as the engine divides them."""
    return Devices.model_validate(devices.model_dump() | _placed(count))


def build_replay(
    recording: Recording,
    devices: Devices,
    schedule: str | None = None,
    overcommit: int | None = None,
    batch_size: int | None = None,
    begun: Mapping[int, int] | None = None,
) -> Engine:
    """An engine whose answers have the recorded lengths. `schedule`: default: the recorded one.

    `overcommit`: a fixed Δ; default: the recorded Δ of each step. `batch_size`: another B. `begun`: see `recorded_lengths`.

    Raises:
        SpecError, DevicesError: the run's other settings or the devices do not allow this schedule.
    """
    spec = recording.spec
    chosen = spec if schedule is None else variant(spec, schedule, len(recording.steps), overcommit)
    tree = chosen.model_dump(mode="json")
    tree["ppo"]["batch_size"] = batch_size or spec.ppo.batch_size
    tree["logging"] |= {"samples_per_step": 0, "spans_every": 1}
    tree["overlap"]["overcommit"]["controller"] = tree["overlap"]["chunk"]["controller"] = "fixed"
    chosen = load_spec(shortened(tree, len(recording.steps)))
    length = recorded_lengths(spec.seed, recording.lengths, spec.rollout.max_new_tokens, begun)
    engine = assemble(chosen, devices, length)
    engine.prompts = recorded_prompts(recording, engine)
    return engine


def recorded_prompts(recording: Recording, engine: Engine) -> PromptStream:
    """Prompts with the recorded lengths, in order: answers are numbered in the order of their prompts."""
    known, mean = recording.prompts, round(float(np.mean(list(recording.prompts.values()))))
    prompts: list[NDArray[np.int64]] = [
        np.zeros(known.get(number, mean), dtype=np.int64) for number in range(max(known) + 1 + 4 * len(known))
    ]
    assert isinstance(engine.prompts, PricedPrompts)
    return PricedPrompts(prompts, recording.spec.seed, False, engine.prompts.machine)


def run(engine: Engine, recording: Recording, follow: bool) -> Iterator[float]:
    """Train; yields each step's length in seconds. `follow`: use the recorded Δ. C is always the recorded one."""
    step_report.started(engine)
    start = engine.clock()
    for step in recording.steps:
        if follow:
            engine.overcommit.overcommit = step.overcommit
        engine.chunk = ChunkState(step.chunk)
        end = train_step(engine, start)
        yield end - start
        start = end


def unfinished(recording: Recording, devices: Devices) -> dict[int, int]:
    """Tokens of every answer that was begun but not finished when the recording ended, by sequence_id.

    One that ended in the last step, but was left for the next, counts as unfinished: events do not say when an answer ended.
    """
    engine = build_replay(recording, devices)
    for _ in run(engine, recording, follow=True):
        pass
    return {sequence.sequence_id: sequence.length for sequence in engine.pool.sequences}


def simulated_spans(engine: Engine) -> dict[Key, tuple[float, float]]:
    """Every span of a replay by key."""
    assert isinstance(engine.journal, MemoryJournal)
    spans: dict[Key, tuple[float, float]] = {}
    for kind, payload in engine.journal.events:
        if kind == "spans":
            spans |= spans_by_key(SpansEvent.model_validate({"producer": "engine", "seq": 1, "time": 0.0} | payload))
    return spans

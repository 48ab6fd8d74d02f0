"""The state of a run: `Engine` with its parts, and `Progress`. `engine/build.py` builds an `Engine` from a spec."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from oppo_contract.events import Provenance
from oppo_contract.resume_rules import Change
from oppo_contract.spec import RunSpec
from oppo_core.control.controllers import ChunkState, OvercommitState
from oppo_core.control.run_score import RunScore
from oppo_core.control.stop_conditions import reason_to_end
from oppo_core.distributed.process_group import SINGLE, RankError, Ranks
from oppo_core.engine.layout import Layout
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.tensor_files import Writer
from oppo_core.ppo.actor import ActorProtocol
from oppo_core.ppo.experience import Experience, build_experience
from oppo_core.ppo.reward_shaping import ScoreMoments
from oppo_core.reporting.event_log import Journal
from oppo_core.reporting.metrics import Cohorts
from oppo_core.rollout.conversations import Conversations, prompt_text
from oppo_core.rollout.decoder import DecoderProtocol
from oppo_core.rollout.held_out import Evaluator
from oppo_core.rollout.placement import assign_ranks, balance_rows, move_sequences
from oppo_core.rollout.pool import Pool
from oppo_core.rollout.prompts import PromptStream
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.step_state import StepState
from oppo_core.rollout.tokenizer import TextCodec
from oppo_core.scoring.deltas import DeltaTracker
from oppo_core.scoring.scorers import ScorerProtocol
from oppo_core.trace.cpu_time import CpuTime
from oppo_core.trace.gpu_stats import GpuStats
from oppo_core.trace.recorder import Recorder
from oppo_estimate.memory import decode_slots


class UpdateStrategy(Protocol):
    """How a step's batch is trained."""

    def begin(self, engine: Engine) -> None:
        """Called before decoding starts or an interrupted step resumes."""

    def chunk_done(self, engine: Engine, finishers: list[Sequence], version: int) -> None:
        """Called after each chunk that does not complete the batch. `finishers`: responses finished in this step so far."""

    def train_batch(self, engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
        """Train on the complete batch; returns its experience, and `actor/*` and `critic/*` metrics."""


@dataclass(slots=True)
class Progress:
    """Progress of the run. The actor's policy version is `step`, the number of trained PPO steps."""

    step: int = 0
    elapsed_s: float = 0.0
    generated_tokens: int = 0
    kl_coefficient: float = 0.0
    nonfinite_steps: int = 0  # skipped so far
    nonfinite_row: int = 0  # of which consecutive
    nonfinite_at: int = -1  # step of the last one
    passes: dict[str, int] = field(default_factory=dict)  # budgets (padded tokens) reduced by OOM retries, by `PassBudget.name`


@dataclass(slots=True)
class Engine:
    """Everything that a training step reads and changes."""

    spec: RunSpec
    layout: Layout
    codec: TextCodec
    prompts: PromptStream
    pool: Pool
    decoder: DecoderProtocol
    actor: ActorProtocol
    scorers: ScorerProtocol
    journal: Journal
    out: Path
    model_source: Path | None
    trace: Recorder
    progress: Progress
    overcommit: OvercommitState
    chunk: ChunkState
    update: UpdateStrategy
    deltas: DeltaTracker = field(default_factory=DeltaTracker)
    cohorts: Cohorts = field(default_factory=Cohorts)
    run_score: RunScore = field(default_factory=RunScore)
    evaluator: Evaluator | None = None
    provenance: Provenance | None = None
    batch: StepState | None = None  # an unfinished step
    saved: str | None = None  # name of the checkpoint of the present state
    changes: list[Change] = field(default_factory=list)  # of the spec since the resumed checkpoint
    clock: Callable[[], float] = time.monotonic
    set_threads: Callable[[int], None] = torch.set_num_threads
    experience: Callable[..., Experience] = build_experience
    moments: ScoreMoments = field(default_factory=ScoreMoments)
    origin: float = 0.0  # `clock()` of the `started` event
    ranks: Ranks = SINGLE
    hardware: GpuStats = field(default_factory=GpuStats)
    cpu_time: CpuTime | None = None  # of real processes
    conversations: Conversations = field(default_factory=Conversations)  # of the prompts
    parameters: int = 0  # of the actor, including frozen ones
    writer: Writer = field(default_factory=Writer)  # of checkpoints

    def sampled_prompt(self, sequence: Sequence) -> dict[str, Any]:
        """The fields `prompt` and `messages` of a sample."""
        ids = sequence.prompt.tolist()
        messages = self.conversations.messages(ids)
        return {"prompt": prompt_text(ids, messages, self.codec), "messages": messages}

    def new_group(self, sequence_ids: range) -> list[Sequence]:
        """Empty responses with these ids to the next prompt; the ids are one group."""
        index = self.prompts.draw(sequence_ids.start // self.spec.ppo.group_size)
        return [Sequence(sequence_id, index, self.prompts.prompts[index]) for sequence_id in sequence_ids]

    def release(self, discarded: Iterable[Sequence]) -> None:
        """Free the scorers' caches of discarded sequences."""
        self.scorers.release(self.deltas.forget(s.sequence_id for s in discarded))

    @property
    def budgets(self) -> list[PassBudget]:
        """Pass budgets of the actor and the decoder; the scorers have their own."""
        budgets = (getattr(part, "budget", None) for part in (self.actor, self.decoder))
        return [budget for budget in budgets if budget is not None]

    @property
    def serialize_updates(self) -> bool:
        """Whether the actor's update waits for the critic's, because NCCL kernels of two groups on one GPU can deadlock."""
        return self.ranks.serialize_reductions and not self.layout.apart

    def use_cores(self, count: int) -> None:
        """Set the number of CPU threads, in the trace too."""
        self.set_threads(count)
        self.trace.devices = self.layout.cores(count)

    @contextmanager
    def training_cores(self) -> Iterator[None]:
        """Use all cores on which the actor is trained, and afterwards its own."""
        self.use_cores(len(self.layout.training_devices))
        try:
            yield
        finally:
            self.use_cores(len(self.layout.actor_devices))

    def on_any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. Waits for the slowest rank, which the trace records as tail."""
        if self.ranks.world == 1:
            return flag
        with self.trace.wait("tail"):
            return self.ranks.any(flag)

    def reason_to_end(self) -> str | None:
        """Why training ends, or None. Rank 0 decides, because the ranks' clocks differ."""
        reason = reason_to_end(self.spec, self.progress.step, self.progress.elapsed_s, self.run_score)
        return self.ranks.all_gather((reason or "").encode())[0].decode() or None

    def local(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those of which this rank has the tokens; all in a run of one rank."""
        return [s for s in sequences if s.remote_length is None]

    def check_pools(self) -> None:
        """Compare the ranks' pools, which every rank computes for itself. Raises RankError if they differ. Collective."""
        rows = [(s.sequence_id, s.age, s.length, s.finished) for s in self.pool.sequences]
        pool = f"{self.overcommit.overcommit} {self.chunk.current} {self.pool.next_group} {rows}"
        digests = self.ranks.all_gather(hashlib.sha256(pool.encode()).digest())
        if any(digest != digests[0] for digest in digests):
            raise RankError(
                f"the ranks' pools differ at step {self.progress.step + 1}, so that they would train different batches; resume"
                " from the last checkpoint, and report this"
            )

    def place(self, sequences: list[Sequence]) -> None:
        """Place unfinished sequences on the ranks, and free the scorers' caches of those that leave this one.

        Collective; compares the ranks' pools first. A no-op in a run of one rank.
        """
        if self.ranks.world == 1:
            return
        with self.trace.span("actor", "data"):
            self.check_pools()
            assigned = assign_ranks(sequences, self.ranks.world, decode_slots(self.spec), self.spec.rollout.max_new_tokens)
            self.release(move_sequences(sequences, assigned, self.ranks))

    def balance(self, rows: list[Sequence]) -> None:
        """Balance the rows of the batch by tokens among the ranks that train them, if they may be moved. Collective."""
        if self.ranks.world > 1 and may_move_rows(self.spec):
            move_sequences(rows, balance_rows(rows, self.ranks.world), self.ranks)

    def readable(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Sequences to send to this rank's scorers: all of its own (`intra_step: per_chunk`), otherwise finished ones only."""
        return [s for s in self.local(sequences) if s.finished or self.spec.overlap.intra_step == "per_chunk"]


def may_move_rows(spec: RunSpec) -> bool:
    """Whether rows of a batch may be trained by another rank than the one that decoded them.

    They stay where scorers may have begun to read them: with streaming to scorers with whole weights, and with dynamic sampling.
    """
    movable = spec.overlap.intra_step == "off" or spec.training.shards_weights
    return movable and not spec.ppo.dynamic_sampling

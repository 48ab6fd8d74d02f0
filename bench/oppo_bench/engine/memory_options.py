"""Cost and saving of each option for an update's memory: one actor's trainer trains one batch repeatedly under each option."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from oppo_bench.document import Result
from oppo_bench.engine.live_bytes import LiveBytes
from oppo_bench.engine.workload import PROMPT_TOKENS, VOCAB, Lengths
from oppo_contract.spec import Ppo, Training
from oppo_core.models.activation_checkpointing import prepare_for_training
from oppo_core.models.protocol import Network
from oppo_core.ppo.actor import ActorTrainer
from oppo_core.ppo.deferred_metrics import TokenSums
from oppo_core.ppo.experience import Experience, build_experience
from oppo_core.ppo.reward_shaping import ScoreMoments
from oppo_core.ppo.scored import Scored
from oppo_core.rollout.sequence import Sequence

RECOMPUTE, PACKING = ("off", "head", "selective", "full"), {"padded": "off", "packed": "on"}
LEVERS = {
    f"{recompute}-{name}": Training.model_validate({"recompute": recompute, "packing": packing})
    for name, packing in PACKING.items()
    for recompute in RECOMPUTE
}
BASE = "off-padded"
MIB = 2**20


class Update:
    """An actor's trainer and a batch of answers with fixed lengths; `lever` sets how its passes run."""

    def __init__(self, network: Network, batch: int, lengths: Lengths, budget: int) -> None:
        """`budget`: most tokens of a pass, padding included."""
        ppo = Ppo(batch_size=batch, micro_batch_tokens=budget, learning_rate=1e-6)
        self.trainer = ActorTrainer(network, ppo, 1.0, 0, 10**7)
        self.sequences = [_answer(number, lengths.of(number)) for number in range(batch)]
        self.device = next(network.parameters()).device
        self._steps = 0

    @property
    def tokens(self) -> int:
        """Tokens of the batch, prompts included."""
        return sum(len(s.tokens()) for s in self.sequences)

    def set(self, lever: Training) -> None:
        """Use the option `lever` from now on."""
        self.trainer.training = lever
        prepare_for_training(self.trainer.network, lever)

    def seconds(self) -> float:
        """Seconds of one PPO update of the actor: proximal log-probs, loss, gradients and optimizer step.

        On a CPU processor seconds, which other programs barely change; on a GPU wall time.
        """
        clock = time.process_time if self.device.type == "cpu" else time.perf_counter
        self._wait()
        start = clock()
        self.trainer.update(self._experience(), self._steps, 0.05)
        self._wait()
        self._steps += 1
        return clock() - start

    def peak(self) -> int:
        """Most bytes that its passes hold besides weights and optimizer: activations, logits, gradients."""
        self.trainer.optimizer.begin(0)  # the last step's gradients
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self._passes()
            return torch.cuda.max_memory_allocated(self.device) - before
        with LiveBytes() as counted:
            self._passes()
        return counted.peak

    def gradients(self, lever: Training) -> list[torch.Tensor]:
        """Gradients of its passes under an option."""
        self.set(lever)
        self._passes()
        found = [p.grad.clone() for p in self.trainer.optimizer.parameters if p.grad is not None]
        self.trainer.optimizer.begin(0)
        return found

    def _passes(self) -> None:
        experience = self._experience()
        total = int(experience.mask.sum())
        self.trainer.accumulate(experience, list(range(len(self.sequences))), 0.05, total, TokenSums(), self._steps)

    def _experience(self) -> Experience:
        rows = [s.tokens() for s in self.sequences]
        proximal = self.trainer.logprobs(rows, [len(s.prompt) for s in self.sequences])
        scored = [Scored(float(s.length % 7), np.zeros(s.length), np.zeros(s.length)) for s in self.sequences]
        return build_experience(self.sequences, proximal, scored, self.trainer.ppo, 0.05, 0, ScoreMoments())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _answer(number: int, length: int) -> Sequence:
    drawn: Any = np.random.Generator(np.random.Philox(key=[11, number]))
    tokens = drawn.integers(3, VOCAB, PROMPT_TOKENS + length)
    response = tokens[PROMPT_TOKENS:].tolist()
    return Sequence(number, number, tokens[:PROMPT_TOKENS], response, [-7.0] * length, [0] * length, finished=True)


@dataclass(slots=True)
class Figures:
    """Measurements of one option: seconds of each update, and bytes of its passes; or the reason why it was not measured."""

    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    failed: str = ""


def measured(update: Update, repetitions: int, continues: Callable[[], bool] = lambda: True) -> dict[str, Figures]:
    """Measure every option in turn, `repetitions` times while it `continues`, after an untimed round that counts bytes."""
    found = {name: Figures() for name in LEVERS}
    for repetition in range(repetitions + 1):
        if repetition > 1 and not continues():
            break
        for name, figures in found.items():
            if figures.failed:
                continue
            update.set(LEVERS[name])
            try:
                if repetition == 0:
                    figures.peak = update.peak()
                seconds = update.seconds()
            except torch.OutOfMemoryError as error:
                figures.failed = str(error).splitlines()[0]
                continue
            figures.seconds += [seconds] if repetition else []
    update.set(LEVERS[BASE])
    return found


def to_results(case: str, found: dict[str, Figures]) -> list[Result]:
    """Figures by name: {case}/{option}/ms_an_update, …/slowdown (within a round), …/peak_mb."""
    results = []
    for name, figures in found.items():
        if not figures.seconds:
            continue
        results += [
            Result.of(f"{case}/{name}/ms_an_update", "ms", [1e3 * seconds for seconds in figures.seconds]),
            Result.of(f"{case}/{name}/peak_mb", "MiB", [figures.peak / MIB]),
        ]
        if not found[BASE].failed:
            ratios = [own / base for own, base in zip(figures.seconds, found[BASE].seconds, strict=True)]
            results.append(Result.of(f"{case}/{name}/slowdown", "x", ratios))
    return results


def table(case: str, results: list[Result]) -> list[str]:
    """One row per option."""
    named = {result.name: result for result in results}
    lines = [
        f"{'setting':18}{'ms an update':>14}{'min–max':>18}{'÷ ' + BASE:>14}{'min–max':>13}{'MiB at the peak':>18}{'share':>8}"
    ]
    base = named.get(f"{case}/{BASE}/peak_mb")
    for name in LEVERS:
        taken = named.get(f"{case}/{name}/ms_an_update")
        if taken is None:
            continue
        ratio, peak = named.get(f"{case}/{name}/slowdown"), named[f"{case}/{name}/peak_mb"].median
        compared = ("–", "–", "–")
        if ratio is not None and base is not None:
            compared = (f"{ratio.median:.2f}", f"{ratio.min:.2f}–{ratio.max:.2f}", f"{peak / base.median:.0%}")
        spread = f"{taken.min:,.1f}–{taken.max:,.1f}"
        lines.append(f"{name:18}{taken.median:14,.1f}{spread:>18}{compared[0]:>14}{compared[1]:>13}{peak:18,.1f}{compared[2]:>8}")
    return lines

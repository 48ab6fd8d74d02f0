"""A decoder that is vLLM's engine in our own process: one step of it is one round, so chunks end at the very token.

Its weights are the trainer's, handed over at the beginning of a step; deferred answers are read anew under them. Requests are
told to end by the length limit and by the end-of-sequence token, all other ends are ours. vLLM labels tokens with the version of
the weights that sampled them, which is compared with what we have noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.stop_conditions import StopConditions, update_finished
from oppo_core.vllm.engine_args import IN_PROCESS_ENVIRONMENT, prepare, sampling_arguments, sampling_supports, tokens_prompt
from oppo_core.vllm.errors import VllmError
from oppo_core.vllm.protocols import Completion, Engine, Output

# The trainer's weights by the names of the model's folder, adapters merged.
Weights = Callable[[], Iterable[tuple[str, Tensor]]]


def start_engine(arguments: dict[str, Any]) -> Engine:
    """vLLM's engine in this process. `arguments`: see `engine_arguments`.

    Raises:
        ImportError: vLLM is not installed.
    """
    prepare(IN_PROCESS_ENVIRONMENT)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    started: Engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    return started


def sampling_parameters(arguments: dict[str, Any]) -> Any:
    """vLLM's `SamplingParams`; each output tells what is new."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)


def empty_cuda_cache() -> None:
    """Let torch return to the device what it keeps of the update's memory; vLLM takes its own from the device itself."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def out_of_memory_as_vllm_error() -> Iterator[None]:
    """Memory of the GPU that runs out within it is a VllmError that says what to do, whosever words tell of it."""
    try:
        yield
    except (RuntimeError, VllmError) as error:  # torch's own error is a RuntimeError, that of vLLM's allocator a plain one
        if "out of memory" not in str(error):
            raise
        raise VllmError(
            "the GPU has no room for the weights, keys and values that vLLM takes for a step; lower rollout.vllm_memory_share, or"
            f" what training keeps there: {error}"
        ) from error


class InProcessDecoder:
    """A `DecoderProtocol` (oppo_core/rollout/decoder.py) over an `Engine`.

    Unlike `Decoder` it keeps no keys and values over an interruption: resumed answers are read anew.
    """

    def __init__(
        self,
        engine: Engine,
        settings: DecodeSettings,
        weights: Weights,
        stops: StopConditions | None = None,
        parameters: Callable[[dict[str, Any]], Any] = sampling_parameters,
        sleeps: bool = False,
    ) -> None:
        """`sleeps`: the engine was started so that it can give its memory back, and does between two steps."""
        self.engine = engine
        self.settings = settings
        self.live: list[Sequence] = []
        self.rounds = self.decoded = 0  # since `begin`
        self._weights = weights
        self._stops = stops
        self._parameters = parameters
        self._version: int | None = None  # of the weights that the engine has
        self._sleeps, self._asleep = sleeps, False
        self._asked: dict[int, int] = {}  # live sequences, and how many tokens each had when it was asked for

    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        self._take_weights(version)
        kept = {s.sequence_id for s in sequences if self._is_asked(s)} if self.settings.keeps_cache else set()
        if not self.settings.keeps_cache:
            self.engine.reset_prefix_cache(reset_running_requests=True)
        for sequence in sequences:
            if sequence.sequence_id not in kept:
                sequence.kept_version = version if self.settings.keeps_cache else None
        self._ask(sequences)
        self.rounds = self.decoded = 0
        if self._stops is not None:
            self._stops.retain(self._asked)
        return sum(len(s.prompt) + s.length - 1 for s in sequences if s.sequence_id not in kept)

    def _take_weights(self, version: int) -> None:
        """Hand the trainer's weights over. An engine that sleeps has none, and takes room for keys and values only after them."""
        if version == self._version and not self._asleep:
            return
        with out_of_memory_as_vllm_error():
            if self._asleep:
                empty_cuda_cache()
                self.engine.wake_up(tags=["weights"])
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": self._weights()})
            self.engine.set_weight_version(str(version))
            if self._asleep and not self.engine.wake_up(tags=["kv_cache"]):
                raise VllmError("vLLM does not wake up: it has weights, and no room for keys and values")
        self._version, self._asleep = version, False

    def _ask(self, sequences: list[Sequence]) -> None:
        """Let the engine's requests be `sequences`: those that it has go on, others are queued, the rest is forgotten."""
        wanted = {s.sequence_id for s in sequences if self._is_asked(s)}
        self._forget([i for i in self._asked if i not in wanted])
        for sequence in sequences:
            if sequence.sequence_id not in self._asked:
                parameters = self._parameters(sampling_arguments(self.settings, sequence))
                self.engine.add_request(str(sequence.sequence_id), tokens_prompt(sequence), parameters)
                self._asked[sequence.sequence_id] = sequence.length
        self.live = list(sequences)

    def _is_asked(self, sequence: Sequence) -> bool:
        """Whether a request writes this very answer; one that begins anew under the same number is another one."""
        return sequence.sequence_id in self._asked and any(s is sequence for s in self.live)

    def _forget(self, sequence_ids: list[int]) -> None:
        if sequence_ids:
            self.engine.abort_request([str(i) for i in sequence_ids])
        for sequence_id in sequence_ids:
            del self._asked[sequence_id]

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        """See `DecoderProtocol.advance`. A round is a step in which somebody gets a token; others may still be reading."""
        for used in range(1, rounds + 1):
            finished = self._round(version)
            if finished:
                return finished, used
        return [], rounds

    def _round(self, version: int) -> list[Sequence]:
        known = {str(s.sequence_id): s for s in self.live}
        before = self.decoded
        finished: list[Sequence] = []
        while self.decoded == before:
            if not self.engine.has_unfinished_requests():
                raise VllmError(f"vLLM has no request left, but {len(self.live)} answers are unfinished")
            told = [(known[output.request_id], output) for output in self.engine.step()]
            finished += [sequence for sequence, output in told if self._note(sequence, output, version)]
        self.rounds += 1
        self.live = [s for s in self.live if not s.finished]
        return sorted(finished, key=lambda s: s.sequence_id)

    def _note(self, sequence: Sequence, told: Output, version: int) -> bool:
        """Write what is new into the sequence; returns whether it is finished. Raises VllmError when vLLM ended it otherwise."""
        completion: Completion = told.outputs[0]
        tokens, supports = list(completion.token_ids), sampling_supports(completion)
        for place, (token, logprob) in enumerate(zip(tokens, completion.logprobs.logprobs, strict=True)):
            sequence.response.append(token)
            sequence.behaviour_logprobs.append(logprob)
            sequence.token_versions.append(version)
            sequence.support += supports[place : place + 1]
            self.decoded += 1
            if update_finished(sequence, self.settings.eos, self.settings.max_new, self._stops):
                break
        if told.finished:
            self._compare(sequence, completion)
            del self._asked[sequence.sequence_id]
        elif sequence.finished:
            self._forget([sequence.sequence_id])
        return sequence.finished

    def _compare(self, sequence: Sequence, completion: Completion) -> None:
        if not sequence.finished:
            reason = completion.finish_reason
            raise VllmError(f"vLLM ended answer {sequence.sequence_id} after {sequence.length} tokens: {reason}")
        first = self._asked[sequence.sequence_id]
        versions = [int(span.version) for span in completion.weight_versions or [] for _ in range(span.start, span.end)]
        if versions and versions != sequence.token_versions[first:]:
            noted = sequence.token_versions[first:]
            raise VllmError(f"answer {sequence.sequence_id}: vLLM sampled under {versions}, noted were {noted}")

    def pause(self) -> None:
        """Requests stay queued; `begin` loads weights again and recomputes the prefix cache."""
        if self._sleeps:
            self.engine.sleep(level=2, mode="keep")
            self._asleep = True

    def save(self, folder: Path) -> None:
        """See `DecoderProtocol.save`: no keys and values are kept."""

    def load(self, folder: Path, sequences: list[Sequence]) -> None:
        """See `DecoderProtocol.load`: `begin` has them read anew."""

    def close(self) -> None:
        """See `DecoderProtocol.close`: the engine is this process's, and ends with it."""

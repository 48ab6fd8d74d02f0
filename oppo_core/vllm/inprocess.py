"""A decoder over vLLM's engine in our own process: one step of it is one decode round, so a chunk ends at the exact token.

It receives the trainer's weights at the beginning of a step and prefills deferred answers again. vLLM ends requests at the length
limit and at the end-of-sequence token; the decoder ends them at stop conditions. vLLM labels each token with the version of the
weights that sampled it; the label must equal the recorded version.
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
    """vLLM's `SamplingParams`; each output has the new tokens only."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)


def empty_cuda_cache() -> None:
    """Return torch's unused GPU memory to the device, from which vLLM allocates."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def out_of_memory_as_vllm_error() -> Iterator[None]:
    """Turns out-of-memory errors of torch and of vLLM's allocator into a VllmError with a remedy."""
    try:
        yield
    except (RuntimeError, VllmError) as error:  # torch's own error is a RuntimeError, that of vLLM's allocator a plain one
        if "out of memory" not in str(error):
            raise
        raise VllmError(
            "the GPU has no room for vLLM's weights and KV cache of a step; lower rollout.vllm_memory_share, or the memory of"
            f" training: {error}"
        ) from error


class InProcessDecoder:
    """A `DecoderProtocol` (oppo_core/rollout/decoder.py) over an `Engine`.

    A resumed run prefills its answers again: checkpoints have no KV cache.
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
        """`sleeps`: the engine was started with sleep mode and releases its memory between steps."""
        self.engine = engine
        self.settings = settings
        self.live: list[Sequence] = []
        self.rounds = self.decoded = 0  # since `begin`
        self._weights = weights
        self._stops = stops
        self._parameters = parameters
        self._version: int | None = None  # of the weights that the engine has
        self._sleeps, self._asleep = sleeps, False
        self._submitted: dict[int, int] = {}  # live sequences, and the length of each when its request was submitted

    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        self._take_weights(version)
        kept = {s.sequence_id for s in sequences if self._has_request(s)} if self.settings.keeps_cache else set()
        if not self.settings.keeps_cache:
            self.engine.reset_prefix_cache(reset_running_requests=True)
        for sequence in sequences:
            if sequence.sequence_id not in kept:
                sequence.kept_version = version if self.settings.keeps_cache else None
        self._submit(sequences)
        self.rounds = self.decoded = 0
        if self._stops is not None:
            self._stops.retain(self._submitted)
        return sum(len(s.prompt) + s.length - 1 for s in sequences if s.sequence_id not in kept)

    def _take_weights(self, version: int) -> None:
        """Load the trainer's weights. A sleeping engine first allocates weights, and the KV cache after loading them."""
        if version == self._version and not self._asleep:
            return
        with out_of_memory_as_vllm_error():
            if self._asleep:
                empty_cuda_cache()
                self.engine.wake_up(tags=["weights"])
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": self._weights()})
            self.engine.set_weight_version(str(version))
            if self._asleep and not self.engine.wake_up(tags=["kv_cache"]):
                raise VllmError("vLLM does not wake up: it has weights, but no memory for its KV cache")
        self._version, self._asleep = version, False

    def _submit(self, sequences: list[Sequence]) -> None:
        """Make `sequences` the engine's requests: existing ones continue, new ones are submitted, all others are aborted."""
        wanted = {s.sequence_id for s in sequences if self._has_request(s)}
        self._abort([i for i in self._submitted if i not in wanted])
        for sequence in sequences:
            if sequence.sequence_id not in self._submitted:
                parameters = self._parameters(sampling_arguments(self.settings, sequence))
                self.engine.add_request(str(sequence.sequence_id), tokens_prompt(sequence), parameters)
                self._submitted[sequence.sequence_id] = sequence.length
        self.live = list(sequences)

    def _has_request(self, sequence: Sequence) -> bool:
        """Whether a request belongs to this `Sequence` object; a restarted answer has the same id but is another object."""
        return sequence.sequence_id in self._submitted and any(s is sequence for s in self.live)

    def _abort(self, sequence_ids: list[int]) -> None:
        if sequence_ids:
            self.engine.abort_request([str(i) for i in sequence_ids])
        for sequence_id in sequence_ids:
            del self._submitted[sequence_id]

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        """A round is a step in which at least one answer gets a token; others may still be prefilled."""
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
            outputs = [(known[output.request_id], output) for output in self.engine.step()]
            finished += [sequence for sequence, output in outputs if self._record(sequence, output, version)]
        self.rounds += 1
        self.live = [s for s in self.live if not s.finished]
        return sorted(finished, key=lambda s: s.sequence_id)

    def _record(self, sequence: Sequence, output: Output, version: int) -> bool:
        """Append new tokens to the sequence; returns whether it is finished. Raises VllmError if vLLM ended it otherwise."""
        completion: Completion = output.outputs[0]
        tokens, supports = list(completion.token_ids), sampling_supports(completion)
        for place, (token, logprob) in enumerate(zip(tokens, completion.logprobs.logprobs, strict=True)):
            sequence.response.append(token)
            sequence.behaviour_logprobs.append(logprob)
            sequence.token_versions.append(version)
            sequence.support += supports[place : place + 1]
            self.decoded += 1
            if update_finished(sequence, self.settings.eos, self.settings.max_new, self._stops):
                break
        if output.finished:
            self._check_versions(sequence, completion)
            del self._submitted[sequence.sequence_id]
        elif sequence.finished:
            self._abort([sequence.sequence_id])
        return sequence.finished

    def _check_versions(self, sequence: Sequence, completion: Completion) -> None:
        if not sequence.finished:
            reason = completion.finish_reason
            raise VllmError(f"vLLM ended answer {sequence.sequence_id} after {sequence.length} tokens: {reason}")
        first = self._submitted[sequence.sequence_id]
        versions = [int(span.version) for span in completion.weight_versions or [] for _ in range(span.start, span.end)]
        if versions and versions != sequence.token_versions[first:]:
            recorded = sequence.token_versions[first:]
            raise VllmError(f"answer {sequence.sequence_id}: vLLM sampled under {versions}, recorded were {recorded}")

    def pause(self) -> None:
        """Requests stay queued; `begin` loads weights again and recomputes the prefix cache."""
        if self._sleeps:
            self.engine.sleep(level=2, mode="keep")
            self._asleep = True

    def save(self, folder: Path) -> None:
        """No-op: checkpoints have no KV cache."""

    def load(self, folder: Path, sequences: list[Sequence]) -> None:
        """No-op: `begin` prefills the answers again."""

    def close(self) -> None:
        """No-op: the engine ends with this process."""

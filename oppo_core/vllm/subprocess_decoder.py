"""A decoder over vLLM's engine in another process, on separate GPUs or the trainer's, which decodes while answers are scored.

One round consumes one received token of every live answer, so chunks and batches do not depend on timing. Tokens that vLLM
sampled beyond the batch's last token are kept for the next step's first rounds, with the version of the weights that sampled
them.

vLLM is paused from a batch's last token to the next step's beginning, when it receives the trainer's weights and drops its KV
cache, unless caches are kept. Versions are recorded when tokens arrive and corrected when a request ends: vLLM then reports which
weights sampled which token.
"""

from __future__ import annotations

import json
import queue
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.sampling_support import support_from_json, support_to_json
from oppo_core.rollout.sequence import Sequence, Support
from oppo_core.rollout.stop_conditions import StopConditions, update_finished
from oppo_core.vllm.asyncio_thread import AsyncioThread
from oppo_core.vllm.engine_args import sampling_arguments, sampling_supports, tokens_prompt
from oppo_core.vllm.errors import VllmError
from oppo_core.vllm.protocols import AsyncEngine, Completion, Output
from oppo_core.vllm.weight_transfer import WeightTransfer

AHEAD = "ahead.json"
# Levels of vLLM's sleep. Dropped weights are sent again; with adapters only they are sent, so the others stay in main memory.
OFFLOAD_WEIGHTS, DROP_WEIGHTS = 1, 2
ABORT_RETRY_S = 0.5  # an abort may arrive before its request and have no effect


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


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token with the log-prob and policy version it was sampled under, and its support (`among`): empty, or one entry."""

    token: int
    logprob: float
    version: int
    among: Support


@dataclass(slots=True, eq=False)
class Row:
    """An answer, its request in flight, and tokens received ahead of their round.

    `first`: number of tokens, those ahead included, when the request was submitted.
    """

    sequence: Sequence
    request: str | None = None
    first: int = 0
    ahead: deque[SampledToken] = field(default_factory=deque)

    @property
    def length(self) -> int:
        """Tokens so far, those ahead included."""
        return self.sequence.length + len(self.ahead)


class StreamingDecoder:
    """A `DecoderProtocol` (oppo_core/rollout/decoder.py) over an `AsyncEngine`.

    A resumed run prefills its answers again. Errors are VllmErrors.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        loop: AsyncioThread,
        settings: DecodeSettings,
        weight_transfer: WeightTransfer,
        stops: StopConditions | None = None,
        interval: int = 1,
        parameters: Callable[[dict[str, Any]], Any] = sampling_parameters,
        sleeps: bool = False,
        draws_by_position: bool = True,
    ) -> None:
        """`loop` is the event loop of `engine`; both are closed with the decoder.

        Args:
            interval: tokens per message.
            draws_by_position: see `sampling_arguments`.
        """
        self.engine = engine
        self.settings = settings
        self.live: list[Sequence] = []
        self.rounds = self.decoded = 0  # since `begin`
        self._loop, self._weight_transfer, self._stops, self._parameters = loop, weight_transfer, stops, parameters
        self._interval, self._sleeps, self._draws_by_position = interval, sleeps, draws_by_position
        self._paused = self._asleep = False
        self._version: int | None = None  # of the weights that the engine has
        self._rows: dict[int, Row] = {}
        self._requests: dict[str, Row] = {}
        self._numbers = count()
        self._inbox: queue.SimpleQueue[tuple[str, Output | Exception]] = queue.SimpleQueue()

    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        self._pause()
        continued = {self._active_row(s) for s in sequences}
        # Before the new weights: tokens that still arrive were sampled under the previous ones.
        self._forget([row for row in self._rows.values() if row not in continued])
        drops_cache = not self.settings.keeps_cache or self._asleep
        self._take_weights(version)
        self._rows = {s.sequence_id: self._active_row(s) or Row(s) for s in sequences}
        unread = [row for row in self._rows.values() if drops_cache or self._needs_request(row)]
        for row in unread:
            row.sequence.kept_version = version if self.settings.keeps_cache else None
        self.live = list(sequences)
        self.rounds = self.decoded = 0
        if self._stops is not None:
            self._stops.retain(self._rows)
        self._submit_missing()
        return sum(len(row.sequence.prompt) + row.sequence.length - 1 for row in unread)

    def _active_row(self, sequence: Sequence) -> Row | None:
        """The row of this very `Sequence` object; a restarted answer has the same id but is another object."""
        row = self._rows.get(sequence.sequence_id)
        return row if row is not None and row.sequence is sequence else None

    def _take_weights(self, version: int) -> None:
        """Send the trainer's weights. A sleeping engine first allocates weights, and the KV cache after the transfer."""
        if version == self._version and not self._asleep:
            return
        with out_of_memory_as_vllm_error():
            if self._asleep:
                empty_cuda_cache()
                self._loop.run(self.engine.wake_up(tags=["weights"]), "waking up")
            self._weight_transfer.send(version)
            if self._asleep and not self._loop.run(self.engine.wake_up(tags=["kv_cache"]), "waking up"):
                raise VllmError("vLLM does not wake up: it has weights, but no memory for its KV cache")
        self._version, self._asleep = version, False

    def _pause(self) -> None:
        if not self._paused:
            drops_cache = not self.settings.keeps_cache
            self._loop.run(self.engine.pause_generation(mode="keep", clear_cache=drops_cache), "pausing")
            self._paused = True
        while not self._inbox.empty():
            self._receive()

    def pause(self) -> None:
        """Pause the engine, or put it to sleep; requests stay queued, and `begin` sends weights."""
        if self._sleeps:
            level = DROP_WEIGHTS if self._weight_transfer.lora_request is None else OFFLOAD_WEIGHTS
            self._loop.run(self.engine.sleep(level=level, mode="keep"), "falling asleep")
            self._paused = self._asleep = True
        self._pause()

    def _submit_missing(self) -> None:
        """Submit requests for all answers that need one, and resume the engine."""
        for row in self._rows.values():
            if self._needs_request(row):
                self._start(row)
        self._loop.run(self.engine.resume_generation(), "resuming")
        self._paused = False

    def _needs_request(self, row: Row) -> bool:
        """Whether an answer is incomplete and has no request in flight."""
        ended = bool(row.ahead) and row.ahead[-1].token == self.settings.eos
        return row.request is None and row.length < self.settings.max_new and not ended

    def _start(self, row: Row) -> None:
        ahead = [sampled.token for sampled in row.ahead]
        row.request = f"{row.sequence.sequence_id}.{next(self._numbers)}"
        row.first = row.length
        self._requests[row.request] = row
        arguments = sampling_arguments(self.settings, row.sequence, len(ahead), self._draws_by_position)
        arguments |= {"stream_interval": self._interval}
        self._loop.start(self._follow(row.request, tokens_prompt(row.sequence, ahead), self._parameters(arguments)))

    async def _follow(self, request_id: str, prompt: Any, parameters: Any) -> None:
        """In the loop's thread: put a request's outputs into the inbox."""
        try:
            adapters = self._weight_transfer.lora_request
            async for output in self.engine.generate(prompt, parameters, request_id, lora_request=adapters):
                self._inbox.put((request_id, output))
        except Exception as error:  # noqa: BLE001 - `_receive` raises it in the training loop
            self._inbox.put((request_id, error))

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        """Tokens keep the version that they were sampled under, which may be older than `version`."""
        for used in range(1, rounds + 1):
            finished = self._round()
            if finished:
                return finished, used
        return [], rounds

    def _round(self) -> list[Sequence]:
        rows = [self._rows[s.sequence_id] for s in self.live]
        for row in rows:
            while not row.ahead and row.request is not None:
                self._receive()
            if not row.ahead:
                raise VllmError(f"vLLM ended answer {row.sequence.sequence_id} after {row.sequence.length} tokens")
        finished = [row for row in rows if self._take(row)]
        self._forget(finished)
        self.rounds += 1
        self.decoded += len(rows)
        self.live = [s for s in self.live if not s.finished]
        return sorted((row.sequence for row in finished), key=lambda s: s.sequence_id)

    def _take(self, row: Row) -> bool:
        """Append the next token to the answer; returns whether it is finished."""
        sequence, sampled = row.sequence, row.ahead.popleft()
        sequence.response.append(sampled.token)
        sequence.behaviour_logprobs.append(sampled.logprob)
        sequence.token_versions.append(sampled.version)
        sequence.support += sampled.among
        if update_finished(sequence, self.settings.eos, self.settings.max_new, self._stops):
            row.ahead.clear()
        return sequence.finished

    def _forget(self, rows: list[Row]) -> None:
        self._abort(rows)
        for row in rows:
            del self._rows[row.sequence.sequence_id]

    def _abort(self, rows: list[Row]) -> None:
        """Abort the rows' requests, and receive their remaining tokens."""
        while in_flight := [row.request for row in rows if row.request is not None]:
            self._loop.run(self.engine.abort(in_flight), "ending requests")
            try:
                while any(row.request is not None for row in rows):
                    self._receive(ABORT_RETRY_S)
            except queue.Empty:
                continue

    def _receive(self, timeout_s: float | None = None) -> None:
        """Wait for one message. Raises queue.Empty when none arrives within `timeout_s`, if given."""
        try:
            request_id, message = self._inbox.get(timeout=timeout_s or self._loop.timeout_s)
        except queue.Empty:
            if timeout_s is not None:
                raise
            raise VllmError(
                f"vLLM wrote no token for {self._loop.timeout_s:g} s (resources.longest_silence_s), so it is assumed to hang"
            ) from None
        if isinstance(message, Exception):
            raise VllmError(f"vLLM failed at answer {request_id}: {type(message).__name__}: {message}") from message
        self._record(self._requests[request_id], message)

    def _record(self, row: Row, output: Output) -> None:
        completion: Completion = output.outputs[0]
        assert self._version is not None
        if not row.sequence.finished:
            supports = sampling_supports(completion, self.settings.filters is not None)
            pairs = zip(completion.token_ids, completion.logprobs.logprobs, strict=True) if completion.token_ids else ()
            for index, (token, logprob) in enumerate(pairs):
                row.ahead.append(SampledToken(token, logprob, self._version, supports[index : index + 1]))
        if output.finished:
            assert row.request is not None
            del self._requests[row.request]
            row.request = None
            self._correct_versions(row, completion)

    def _correct_versions(self, row: Row, completion: Completion) -> None:
        """Replace recorded versions by those that vLLM reports. Raises VllmError when a token is newer than recorded."""
        labels = [int(span.version) for span in completion.weight_versions or [] for _ in range(span.start, span.end)]
        written = row.sequence.token_versions
        recorded = [*written, *(sampled.version for sampled in row.ahead)][row.first :]
        if not labels or labels[: len(recorded)] == recorded:
            return
        known = labels[: len(recorded)]
        if len(known) < len(recorded) or any(label > seen for label, seen in zip(known, recorded, strict=True)):
            raise VllmError(f"answer {row.sequence.sequence_id}: vLLM sampled under {labels}, recorded were {recorded}")
        for place, label in enumerate(known, start=row.first):
            if place < len(written):
                written[place] = label
            else:
                row.ahead[place - len(written)] = replace(row.ahead[place - len(written)], version=label)

    def save(self, folder: Path) -> None:
        """Save tokens received ahead. Requests are aborted and submitted again, whether or not the run resumes from here."""
        self._abort(list(self._rows.values()))
        if ahead := self._ahead_as_json():
            (folder / AHEAD).write_text(json.dumps(ahead))

    def load(self, folder: Path, sequences: list[Sequence]) -> None:
        if (folder / AHEAD).exists():
            self._restore_ahead(json.loads((folder / AHEAD).read_text()), {s.sequence_id: s for s in sequences})

    def _ahead_as_json(self) -> dict[str, list[dict[str, Any]]]:
        """Tokens received ahead by sequence_id, as plain data."""
        ahead = {str(i): [asdict(t) | {"among": support_to_json(t.among)} for t in row.ahead] for i, row in self._rows.items()}
        return {i: tokens for i, tokens in ahead.items() if tokens}

    def _restore_ahead(self, ahead: dict[str, list[dict[str, Any]]], sequences: dict[int, Sequence]) -> None:
        for sequence_id, tokens in ahead.items():
            sequence = sequences.get(int(sequence_id))
            if sequence is not None and not sequence.finished:
                restored = (SampledToken(**token | {"among": support_from_json(token["among"])}) for token in tokens)
                self._rows[sequence.sequence_id] = Row(sequence, ahead=deque(restored))

    def close(self) -> None:
        try:
            self._weight_transfer.close()
        finally:
            try:
                self.engine.shutdown()
            finally:
                self._loop.close()

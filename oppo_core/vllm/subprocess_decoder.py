"""A decoder that is vLLM's engine in a process of its own, on GPUs of its own or on ours, and decodes on while we take and score.

Its tokens come in pieces, and each is taken in its turn: a round is one token of every live answer, whenever it came. So chunks
and batches are counted as with every other decoder, and depend on no timing. What vLLM has written beyond the batch's last token
waits for the next step, whose first rounds it is, with the version of the weights that sampled it.

From a batch's last token to the next step's beginning vLLM is paused. Then it is given the trainer's weights, and forgets what it
has cached, unless caches are kept. Versions are noted as tokens come. vLLM tells with a request's end which weights sampled which
token, and that is what counts: of tokens that it has held back the first may be older than they looked.
"""

from __future__ import annotations

import json
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.sampling_support import support_from_json, support_to_json
from oppo_core.rollout.sequence import Sequence, Support
from oppo_core.rollout.stop_conditions import StopConditions, update_finished
from oppo_core.vllm.asyncio_thread import Loop
from oppo_core.vllm.engine_args import prompt_of, sampling_arguments, supports_of
from oppo_core.vllm.errors import VllmError
from oppo_core.vllm.inprocess import give_back_cached, sampling_parameters, short_memory_named
from oppo_core.vllm.protocols import AsyncEngine, Completion, Output
from oppo_core.vllm.weight_transfer import HandOver

AHEAD = "ahead.json"
ASKS_AGAIN_S = 0.5  # an abort that overtook its request found nothing


@dataclass(frozen=True, slots=True)
class Told:
    """A token that vLLM has sampled, the log-prob and version it was sampled under, and among what: empty, or one entry."""

    token: int
    logprob: float
    version: int
    among: Support


@dataclass(slots=True, eq=False)
class Row:
    """An answer, the request that writes it while there is one, and tokens that have come before their turn.

    `first`: how many tokens it had, those before their turn included, when it was asked for.
    """

    sequence: Sequence
    request: str | None = None
    first: int = 0
    ahead: deque[Told] = field(default_factory=deque)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.sequence.length + len(self.ahead)


class StreamingDecoder:
    """A `DecoderProtocol` (oppo_core/rollout/decoder.py) over an `AsyncEngine`.

    It keeps no keys and values over an interruption: what is resumed is read anew. Errors are VllmErrors.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        loop: Loop,
        settings: DecodeSettings,
        hand_over: HandOver,
        stops: StopConditions | None = None,
        interval: int = 1,
        parameters: Callable[[dict[str, Any]], Any] = sampling_parameters,
        sleeps: bool = False,
    ) -> None:
        """`interval`: tokens that come together. `loop` is where `engine` was made; both are closed with the decoder."""
        self.engine = engine
        self.settings = settings
        self.live: list[Sequence] = []
        self.rounds = self.decoded = 0  # since `begin`
        self._loop, self._hand_over, self._stops, self._parameters = loop, hand_over, stops, parameters
        self._interval, self._sleeps = interval, sleeps
        self._paused = self._asleep = False
        self._version: int | None = None  # of the weights that the engine has
        self._rows: dict[int, Row] = {}
        self._requests: dict[str, Row] = {}
        self._numbers = count()
        self._inbox: queue.SimpleQueue[tuple[str, Output | Exception]] = queue.SimpleQueue()

    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        self._pause()
        going_on = {self._row_of(s) for s in sequences}
        # Before other weights come: what arrives of these answers was sampled under the weights before.
        self._forget([row for row in self._rows.values() if row not in going_on])
        forgets = not self.settings.keeps_cache or self._asleep
        self._take_weights(version)
        self._rows = {s.sequence_id: self._row_of(s) or Row(s) for s in sequences}
        unread = [row for row in self._rows.values() if forgets or self._lacks(row)]
        for row in unread:
            row.sequence.kept_version = version if self.settings.keeps_cache else None
        self.live = list(sequences)
        self.rounds = self.decoded = 0
        if self._stops is not None:
            self._stops.retain(self._rows)
        self._ask()
        return sum(len(row.sequence.prompt) + row.sequence.length - 1 for row in unread)

    def _row_of(self, sequence: Sequence) -> Row | None:
        """What is under way of this very answer; one that begins anew under the same number is another one."""
        row = self._rows.get(sequence.sequence_id)
        return row if row is not None and row.sequence is sequence else None

    def _take_weights(self, version: int) -> None:
        """Hand the trainer's weights over. An engine that sleeps has none, and takes room for keys and values only after them."""
        if version == self._version and not self._asleep:
            return
        with short_memory_named():
            if self._asleep:
                give_back_cached()
                self._loop.run(self.engine.wake_up(tags=["weights"]), "waking up")
            self._hand_over.send(version)
            if self._asleep and not self._loop.run(self.engine.wake_up(tags=["kv_cache"]), "waking up"):
                raise VllmError("vLLM does not wake up: it has weights, and no room for keys and values")
        self._version, self._asleep = version, False

    def _pause(self) -> None:
        if not self._paused:
            forgets = not self.settings.keeps_cache
            self._loop.run(self.engine.pause_generation(mode="keep", clear_cache=forgets), "pausing")
            self._paused = True
        while not self._inbox.empty():
            self._hear()

    def pause(self) -> None:
        """See `DecoderProtocol.pause`. Requests stay queued; weights come again with `begin`."""
        if self._sleeps:
            self._loop.run(self.engine.sleep(level=2, mode="keep"), "falling asleep")
            self._paused = self._asleep = True
        self._pause()

    def _ask(self) -> None:
        """Ask for the rest of every live answer that nobody writes, and let vLLM go on."""
        for row in self._rows.values():
            if self._lacks(row):
                self._start(row)
        self._loop.run(self.engine.resume_generation(), "resuming")
        self._paused = False

    def _lacks(self, row: Row) -> bool:
        """Whether an answer has an unwritten rest that nobody writes."""
        ended = bool(row.ahead) and row.ahead[-1].token == self.settings.eos
        return row.request is None and row.length < self.settings.max_new and not ended

    def _start(self, row: Row) -> None:
        waiting = [told.token for told in row.ahead]
        row.request = f"{row.sequence.sequence_id}.{next(self._numbers)}"
        row.first = row.length
        self._requests[row.request] = row
        arguments = sampling_arguments(self.settings, row.sequence, len(waiting)) | {"stream_interval": self._interval}
        self._loop.start(self._follow(row.request, prompt_of(row.sequence, waiting), self._parameters(arguments)))

    async def _follow(self, request_id: str, prompt: Any, parameters: Any) -> None:
        """In the loop's thread: put into the inbox whatever comes of a request."""
        try:
            async for output in self.engine.generate(prompt, parameters, request_id):
                self._inbox.put((request_id, output))
        except Exception as error:  # noqa: BLE001 - the training loop must hear of it, whatever it was
            self._inbox.put((request_id, error))

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        """See `DecoderProtocol.advance`. Tokens have the version that they were sampled under, which may be an older one."""
        for used in range(1, rounds + 1):
            finished = self._round()
            if finished:
                return finished, used
        return [], rounds

    def _round(self) -> list[Sequence]:
        rows = [self._rows[s.sequence_id] for s in self.live]
        for row in rows:
            while not row.ahead and row.request is not None:
                self._hear()
            if not row.ahead:
                raise VllmError(f"vLLM ended answer {row.sequence.sequence_id} after {row.sequence.length} tokens")
        finished = [row for row in rows if self._take(row)]
        self._forget(finished)
        self.rounds += 1
        self.decoded += len(rows)
        self.live = [s for s in self.live if not s.finished]
        return sorted((row.sequence for row in finished), key=lambda s: s.sequence_id)

    def _take(self, row: Row) -> bool:
        """Write the next token into the answer; returns whether it is finished."""
        sequence, told = row.sequence, row.ahead.popleft()
        sequence.response.append(told.token)
        sequence.behaviour_logprobs.append(told.logprob)
        sequence.token_versions.append(told.version)
        sequence.support += told.among
        if update_finished(sequence, self.settings.eos, self.settings.max_new, self._stops):
            row.ahead.clear()
        return sequence.finished

    def _forget(self, rows: list[Row]) -> None:
        self._abort(rows)
        for row in rows:
            del self._rows[row.sequence.sequence_id]

    def _abort(self, rows: list[Row]) -> None:
        """End the requests that still write these, and take what they have written so far."""
        while under_way := [row.request for row in rows if row.request is not None]:
            self._loop.run(self.engine.abort(under_way), "ending requests")
            try:
                while any(row.request is not None for row in rows):
                    self._hear(ASKS_AGAIN_S)
            except queue.Empty:
                continue

    def _hear(self, patience_s: float | None = None) -> None:
        """Wait for one piece of news. Raises queue.Empty when none comes within `patience_s`, where that is given."""
        try:
            request_id, told = self._inbox.get(timeout=patience_s or self._loop.silence_s)
        except queue.Empty:
            if patience_s is not None:
                raise
            raise VllmError(
                f"vLLM wrote no token for {self._loop.silence_s:g} s (resources.longest_silence_s), so it is taken for hung"
            ) from None
        if isinstance(told, Exception):
            raise VllmError(f"vLLM failed at answer {request_id}: {type(told).__name__}: {told}") from told
        self._note(self._requests[request_id], told)

    def _note(self, row: Row, told: Output) -> None:
        completion: Completion = told.outputs[0]
        assert self._version is not None
        if not row.sequence.finished:
            supports = supports_of(completion)
            pairs = zip(completion.token_ids, completion.logprobs.logprobs, strict=True) if completion.token_ids else ()
            for place, (token, logprob) in enumerate(pairs):
                row.ahead.append(Told(token, logprob, self._version, supports[place : place + 1]))
        if told.finished:
            assert row.request is not None
            del self._requests[row.request]
            row.request = None
            self._settle(row, completion)

    def _settle(self, row: Row, completion: Completion) -> None:
        """Correct what was noted of versions by what vLLM says. Raises VllmError when a token came before its weights."""
        labels = [int(span.version) for span in completion.weight_versions or [] for _ in range(span.start, span.end)]
        written = row.sequence.token_versions
        noted = [*written, *(told.version for told in row.ahead)][row.first :]
        if not labels or labels[: len(noted)] == noted:
            return
        known = labels[: len(noted)]
        if len(known) < len(noted) or any(label > seen for label, seen in zip(known, noted, strict=True)):
            raise VllmError(f"answer {row.sequence.sequence_id}: vLLM sampled under {labels}, noted were {noted}")
        for place, label in enumerate(known, start=row.first):
            if place < len(written):
                written[place] = label
            else:
                row.ahead[place - len(written)] = replace(row.ahead[place - len(written)], version=label)

    def save(self, folder: Path) -> None:
        """See `DecoderProtocol.save`: tokens received ahead. Requests end here and are submitted again, resumed or not."""
        self._abort(list(self._rows.values()))
        if ahead := self._waiting():
            (folder / AHEAD).write_text(json.dumps(ahead))

    def load(self, folder: Path, sequences: list[Sequence]) -> None:
        if (folder / AHEAD).exists():
            self._take_back(json.loads((folder / AHEAD).read_text()), {s.sequence_id: s for s in sequences})

    def _waiting(self) -> dict[str, list[dict[str, Any]]]:
        """Tokens before their turn by sequence_id, as plain data."""
        told = {str(i): [asdict(t) | {"among": support_to_json(t.among)} for t in row.ahead] for i, row in self._rows.items()}
        return {i: tokens for i, tokens in told.items() if tokens}

    def _take_back(self, waiting: dict[str, list[dict[str, Any]]], sequences: dict[int, Sequence]) -> None:
        for sequence_id, tokens in waiting.items():
            sequence = sequences.get(int(sequence_id))
            if sequence is not None and not sequence.finished:
                told = (Told(**token | {"among": support_from_json(token["among"])}) for token in tokens)
                self._rows[sequence.sequence_id] = Row(sequence, ahead=deque(told))

    def close(self) -> None:
        """See `DecoderProtocol.close`: vLLM's processes end."""
        try:
            self._hand_over.close()
        finally:
            self.engine.shutdown()
            self._loop.close()

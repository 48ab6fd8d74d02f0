"""Correctness checks in the same run on the same device; the command fails if one fails."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_bench.engine.memory_options import BASE, LEVERS, Update
from oppo_bench.engine.workload import CONTEXT, PROMPT_TOKENS, VOCAB, Lengths, Load
from oppo_bench.gpu.random_models import ModelSet
from oppo_core.models.huggingface import HuggingFaceNetwork
from oppo_core.models.incremental_prefill import IncrementalPrefill
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.upcast import precise
from oppo_core.rollout.decoder import Decoder, DecodeSettings
from oppo_core.rollout.sequence import Sequence

PROMPTS, COMPANY, CHUNK = 8, 4, 16
# A temperature that makes sampling greedy: far below the gaps between float32 logits.
GREEDY = 1e-7
# Nats, and units of the scores. In float32 the limit holds for every value; in bfloat16 for the mean.
WORST, MEAN = 1e-3, 5e-2


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: the value, and its limit; `limit` None: information only."""

    name: str
    seen: float
    limit: float | None
    words: str

    @property
    def fine(self) -> bool:
        """Whether the value is within its limit."""
        return self.limit is None or self.seen <= self.limit


def findings(models: ModelSet, load: Load, kind: type[Decoder]) -> list[Finding]:
    """All checks of a size; `kind` is the decoder that the engine chose for the device."""
    tokens = 32 if load.name == "tiny" else 64
    found = []
    for role in ("reference", "reward", "critic"):
        exact = exactly(models.networks[role])
        if role == "reference":
            found.append(greedy(exact, kind, tokens, "float32", 0.0))
        found.append(streamed(exact, role, load, "float32"))
        del exact
        if load.size.dtype != "float32":
            found.append(streamed(models.networks[role], role, load, load.size.dtype))
    actor = models.networks["actor"]
    if all(weight.requires_grad for weight in actor.parameters()):  # without adapters
        found.append(gradients(exactly(actor), load))
    if load.size.dtype != "float32":
        found.append(greedy(models.networks["reference"], kind, tokens, load.size.dtype, None))
    return found


def exactly(network: HuggingFaceNetwork) -> HuggingFaceNetwork:
    """The same checks in float32, where two ways to compute one number differ little."""
    if next(network.parameters()).dtype == torch.float32:
        return network
    head = None if network.own_head is None else copy.deepcopy(network.own_head).float()
    return HuggingFaceNetwork(copy.deepcopy(network.model).float(), head)


def greedy(network: HuggingFaceNetwork, kind: type[Decoder], tokens: int, dtype: str, limit: float | None) -> Finding:
    """Share of differing greedy tokens between whole passes without a cache, plain decoding, and OPPO's path.

    OPPO's path decodes in chunks together with other answers, and is interrupted, deferred and resumed.
    """
    settings = DecodeSettings(1, -1, GREEDY, CONTEXT - 512, tokens, 4096)
    one, plain = _by_whole_passes(network, tokens), _decoded(Decoder(network, settings, PROMPTS), tokens, 0)
    overlapped = _decoded(kind(network, settings, PROMPTS + COMPANY), tokens, COMPANY)
    pairs = [(a, b) for other in (plain, overlapped) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    share = sum(a != b for a, b in pairs) / len(pairs)
    words = f"greedy tokens that differ between whole passes, {Decoder.__name__} and chunked, deferred {kind.__name__}, {dtype}"
    return Finding(f"greedy_differ_{dtype}", share, limit, words)


def _prompt(number: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=[7, number])).integers(3, VOCAB, PROMPT_TOKENS)


@torch.no_grad()
def _by_whole_passes(network: HuggingFaceNetwork, tokens: int) -> list[list[int]]:
    """The likeliest next token of each prompt, repeatedly, with a full forward pass each time."""
    device = next(network.parameters()).device
    read = torch.tensor(np.stack([_prompt(row) for row in range(PROMPTS)]), device=device)
    for _ in range(tokens):
        positions = torch.arange(read.shape[1], device=device).expand_as(read)
        logits = precise(network.logits(network.hidden(read, positions)[:, -1]))
        read = torch.cat([read, logits.argmax(-1, keepdim=True)], dim=1)
    answers: list[list[int]] = read[:, PROMPT_TOKENS:].tolist()
    return answers


def _decoded(decoder: Decoder, tokens: int, company: int) -> list[list[int]]:
    """Answers of a decoder; with `company` it is interrupted and resumed, as after an update."""
    ours = [Sequence(row, row, _prompt(row)) for row in range(PROMPTS)]
    others = [Sequence(PROMPTS + n, 0, _prompt(PROMPTS + n)[: PROMPT_TOKENS - n]) for n in range(company)]
    decoder.begin(ours + others)
    while decoder.live:
        left = CHUNK if company else tokens
        while left and decoder.live:
            left -= decoder.advance(left, 0)[1]
        if company and ours[0].length == tokens // 2:
            decoder.begin([s for s in ours if not s.finished])
    return [s.response for s in ours]


def streamed(network: HuggingFaceNetwork, role: str, load: Load, dtype: str) -> Finding:
    """Largest difference between outputs of chunked prefill and of one pass."""
    lengths = [int(n) for n in np.clip([load.lengths.of(number) for number in range(PROMPTS)], CHUNK + 1, 200)]
    answers = {
        n: np.random.Generator(np.random.Philox(key=[9, n])).integers(3, VOCAB, length) for n, length in enumerate(lengths)
    }
    by_chunks, whole = _states(network, answers, CHUNK), _states(network, answers, CONTEXT)
    apart = torch.cat([_apart(network, role, answers[n], by_chunks[n], whole[n]) for n in answers])
    words = f"streamed {role} against one pass, {{}} difference, {dtype}"
    if dtype == "float32":
        return Finding(f"streamed_{role}_float32", float(apart.max()), WORST, words.format("largest"))
    return Finding(f"streamed_{role}_{dtype}", float(apart.mean()), MEAN, words.format("mean"))


def gradients(network: HuggingFaceNetwork, load: Load) -> Finding:
    """Relative difference between gradients of packed, recomputed passes and of padded passes that save everything."""
    update = Update(network, PROMPTS, Lengths(load.lengths.seed, longest=200), load.size.micro_batch_tokens)
    plain = update.gradients(LEVERS[BASE])
    apart, length = 0.0, sum(float(gradient.square().sum()) for gradient in plain)
    for mine, other in zip(update.gradients(LEVERS["full-packed"]), plain, strict=True):
        apart += float((mine - other).square().sum())
    update.set(LEVERS[BASE])
    words = "gradients of packed passes that recompute against padded ones that keep everything, share of their length, float32"
    return Finding("update_gradients_float32", (apart / length) ** 0.5, WORST, words)


def _states(network: HuggingFaceNetwork, answers: dict[int, NDArray[np.int64]], chunk: int) -> dict[int, Tensor]:
    """Hidden states [T, H] of every answer, prefilled in chunks of `chunk` tokens."""
    stream = IncrementalPrefill(network, len(answers), CONTEXT, PassBudget(4096))
    states: dict[int, list[Tensor]] = {n: [] for n in answers}
    for end in range(chunk, CONTEXT + chunk, chunk):
        prefixes = {n: tokens[:end] for n, tokens in answers.items()}
        finished = {n for n, tokens in answers.items() if end >= len(tokens)}
        for n, reading in stream.read(prefixes, finished).items():
            repeated = sum(len(part) for part in states[n]) - reading.first
            states[n].append(reading.hidden[repeated:])
    return {n: torch.cat(parts) for n, parts in states.items()}


@torch.no_grad()
def _apart(network: HuggingFaceNetwork, role: str, tokens: NDArray[np.int64], one: Tensor, other: Tensor) -> Tensor:
    said, again = (_outputs(network, role, tokens, states) for states in (one, other))
    return (said - again).abs().flatten().cpu()


def _outputs(network: HuggingFaceNetwork, role: str, tokens: NDArray[np.int64], states: Tensor) -> Tensor:
    """Scores, log-probs of the tokens, or values."""
    if role == "reference":
        next_T1 = torch.from_numpy(tokens[1:]).to(states.device)[:, None]
        return torch.log_softmax(precise(network.logits(states[:-1])), -1).gather(-1, next_T1)
    values = precise(network.scalar(states))
    return values[-1:] if role == "reward" else values

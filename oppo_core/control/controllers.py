"""Controllers of Δ and C, as deterministic functions of recorded signals and their own state; every decision carries its reason.

Δ follows the slope of the reward (arXiv 2509.25762, §3.2 and Algorithm 1, with the dead band of docs/algorithm.md). C is the
chunk size with the lowest cost per token in interleaved trials.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from oppo_contract.spec import Chunk, Overcommit

TRIALS_PER_SIZE = 3
MAX_CANDIDATES = 5


@dataclass(frozen=True, slots=True)
class Decision:
    """A controller's decision: the value before and after (possibly equal), and the reason."""

    old: int
    new: int
    reason: str


@dataclass(slots=True)
class OvercommitState:
    """State of the Δ controller: recent mean scores, their standard errors, and the number of flat steps in a row."""

    overcommit: int
    means: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    flat_steps: int = 0


def adjust_overcommit(state: OvercommitState, settings: Overcommit, mean: float, standard_error: float) -> Decision:
    """Record a step's mean score and adjust Δ; mutates `state`.

    With s = (R_t − R_{t−w})/w and its standard error SE: s > SE raises Δ; s < −SE, or |s| ≤ SE for w steps, lowers it.
    """
    old, w = state.overcommit, settings.window
    state.means = [*state.means, mean][-(w + 1) :]
    state.errors = [*state.errors, standard_error][-(w + 1) :]
    if settings.controller == "fixed":
        return Decision(old, old, "fixed")
    if len(state.means) <= w:
        return Decision(old, old, f"collecting: {len(state.means)} of {w + 1} steps")
    slope = (state.means[-1] - state.means[0]) / w
    noise = (state.errors[-1] ** 2 + state.errors[0] ** 2) ** 0.5 / w
    signal = f"reward slope {slope:+.4f} ± {noise:.4f} a step over {w} steps"
    change = settings.step if settings.rule == "additive" else max(1, old // 4)
    state.flat_steps = state.flat_steps + 1 if abs(slope) <= noise else 0
    if slope > noise:
        new, reason = min(old + change, settings.max), f"{signal}: rising, defer more"
    elif slope < -noise:
        new, reason = max(old - change, settings.min), f"{signal}: falling, defer less"
    elif state.flat_steps >= w:
        new, reason = max(old - change, settings.min), f"{signal}: flat for {w} steps, defer less"
        state.flat_steps = 0
    else:
        new, reason = old, f"{signal}: within the noise, hold"
    state.overcommit = new
    return Decision(old, new, reason)


@dataclass(slots=True)
class ChunkState:
    """State of the C tuner: size in use, sizes still to try, and measured seconds per token by size."""

    size: int
    pending: list[int] = field(default_factory=list)
    measured: dict[int, list[float]] = field(default_factory=dict)
    steps: int = 0
    trying: int | None = None

    @property
    def current(self) -> int:
        """Chunk size of the next step: the one on trial, else the one in use."""
        return self.trying if self.trying is not None else self.size


def adjust_chunk(state: ChunkState, settings: Chunk, longest: int, seconds_per_token: float) -> Decision | None:
    """Record a step's seconds per generated token and choose the next step's C; mutates `state`.

    Every `explore_every` steps each candidate is tried three times, interleaved; the lowest median wins.

    Returns:
        A decision at the end of an exploration, else None.
    """
    if settings.controller == "fixed":
        return None
    state.steps += 1
    if state.trying is not None:
        state.measured.setdefault(state.trying, []).append(seconds_per_token)
        state.trying = state.pending.pop(0) if state.pending else None
        return None if state.trying is not None else _conclude(state)
    if state.steps % settings.explore_every == 0:
        state.pending = chunk_candidates(state.size, settings, longest) * TRIALS_PER_SIZE
        state.measured = {}
        state.trying = state.pending.pop(0)
    return None


def chunk_candidates(size: int, settings: Chunk, longest: int) -> list[int]:
    """Sizes to try: configured ones, or at most five powers of two around `size`, from 8 to half the longest answer."""
    if settings.candidates is not None:
        return sorted(settings.candidates)
    powers = [2**k for k in range(3, 17) if 2**k <= max(8, longest // 2)]
    near = sorted(powers, key=lambda p: (abs(p.bit_length() - size.bit_length()), p))[:MAX_CANDIDATES]
    return sorted(near)


def _conclude(state: ChunkState) -> Decision:
    old = state.size
    costs = {size: median(times) for size, times in state.measured.items()}
    state.size = min(costs, key=lambda size: (costs[size], size))
    listed = ", ".join(f"{size}: {cost * 1e6:.0f} µs" for size, cost in sorted(costs.items()))
    return Decision(old, state.size, f"median time a generated token, {listed}")
